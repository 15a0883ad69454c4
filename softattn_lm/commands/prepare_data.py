"""prepare_data: make the token files of a text, show what is in them, and say what to type next."""

import inspect
import shlex
from typing import Any

from softattn_lm.data.hub import Hub
from softattn_lm.data.prepare import prepare
from softattn_lm.data.sources import ShippedText, TextFiles
from softattn_lm.data.tasks import Task
from softattn_lm.data.token_files import Prepared
from softattn_lm.errors import UserError, visible
from softattn_lm.runs.names import runs_folder
from softattn_lm.tokenizer import KINDS

CHOICES: dict[str, dict[type, str]] = {
    "data": {ShippedText: "austen", TextFiles: "text_file", Hub: "hub"},
    "tokenizer": {kind: name for name, kind in KINDS.items()},
}


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`cfg`: the resolved config of configs/prepare_data.yaml. Raises UserError for a positional word."""
    if words:
        raise UserError(
            f"prepare_data takes no positional argument, but got '{words[0]}'; to prepare your own text use "
            "data=text_file data.path=<file, folder or glob>"
        )
    from softattn_lm.config.build import build

    cache, data = runs_folder(cfg["runs"]) / "cache", build(cfg["data"])
    if isinstance(data, Task):
        raise UserError(f"data={data.name} is made while it trains, and nothing is to be prepared; type it to train")
    show(prepare(data, cfg["tokenizer"], cache))
    print(visible(f"next: {train_command(cfg)}"))


def train_command(cfg: dict[str, Any]) -> str:
    """The command that trains on these token files: the choices, and what differs from their classes' defaults."""
    words = ["softattn", "train"]
    for group, choices in CHOICES.items():
        node = dict(cfg[group])
        name = node.pop("_target_").rpartition(".")[2]
        kind, choice = next((kind, choice) for kind, choice in choices.items() if kind.__name__ == name)
        words.append(f"{group}={choice}")
        parameters = inspect.signature(kind).parameters
        for key, value in node.items():
            if isinstance(value, dict):
                words += [f"+{group}.{key}.{name}={item}" for name, item in value.items()]
            elif value != parameters[key].default:
                words.append(f"{group}.{key}={'null' if value is None else value}")
    return shlex.join(words if cfg["runs"] == "runs" else [*words, f"runs={cfg['runs']}"])


def show(prepared: Prepared) -> None:
    """A table with one row per split, on standard output."""
    from rich.table import Table

    from softattn_lm.training.console import plain_console

    table = Table(title=f"{prepared.source}{', already prepared' if prepared.cached else ''}", title_justify="left")
    table.add_column("split")
    for heading in ("documents", "bytes", "characters", "tokens", "bytes/token"):
        table.add_column(heading, justify="right")
    for name, split in prepared.splits.items():
        ratio = f"{split.n_bytes / split.n_tokens:.2f}" if split.n_tokens else "-"
        begun_before = split.n_tokens > 0 and 0 not in split.documents[:1]
        numbers = (len(split.documents) + begun_before, split.n_bytes, split.n_characters, split.n_tokens)
        table.add_row(name, *(f"{number:,}" for number in numbers), ratio)
    console = plain_console()
    console.print(table)
    tokenizer = prepared.tokenizer
    dtype = prepared.splits["train"].dtype
    print(f"tokenizer {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, stored as {dtype}")
    print(visible(f"token files: {prepared.folder}"))
