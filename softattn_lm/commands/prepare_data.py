"""prepare_data: make the token files of a text, show what is in them, and say what to type next."""

from pathlib import Path
from typing import Any

from softattn_lm.data.prepare import prepare
from softattn_lm.data.token_files import Prepared
from softattn_lm.errors import UserError


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`cfg`: the resolved config of configs/prepare_data.yaml. Raises UserError for a positional word."""
    if words:
        raise UserError(
            f"prepare_data takes no positional argument, but got '{words[0]}'; to prepare your own text use "
            "data=text_file data.path=<file, folder or glob>"
        )
    from softattn_lm.config.build import build

    cache = Path(cfg["runs"]).expanduser() / "cache"
    show(prepare(build(cfg["data"]), cfg["tokenizer"], cache))


def show(prepared: Prepared) -> None:
    """A table with one row per split, on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{prepared.source}{', already prepared' if prepared.cached else ''}", title_justify="left")
    table.add_column("split")
    for heading in ("documents", "bytes", "characters", "tokens", "bytes/token"):
        table.add_column(heading, justify="right")
    for name, split in prepared.splits.items():
        ratio = f"{split.n_bytes / split.n_tokens:.2f}" if split.n_tokens else "-"
        begun_before = split.n_tokens > 0 and 0 not in split.documents[:1]
        numbers = (len(split.documents) + begun_before, split.n_bytes, split.n_characters, split.n_tokens)
        table.add_row(name, *(f"{number:,}" for number in numbers), ratio)
    console = Console()
    console.print(table)
    tokenizer = prepared.tokenizer
    dtype = prepared.splits["train"].dtype
    print(f"tokenizer {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, stored as {dtype}")
    print(f"token files: {prepared.folder}")
    print("next: softattn train with the same data= and tokenizer= words finds them by their content")
