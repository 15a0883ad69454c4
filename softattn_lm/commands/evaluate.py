"""evaluate: how well do runs predict a text? One table, a column per run; the figures also go to each run's folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from softattn_lm.config.rules import require_there
from softattn_lm.config.settings import EvaluateSettings, section
from softattn_lm.errors import UserError
from softattn_lm.own_files import require_own_files
from softattn_lm.runs.files import write_json
from softattn_lm.runs.find import find_run
from softattn_lm.runs.names import run_name, runs_folder


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`words`: runs; none is the newest. Raises UserError for a run, a text or a checkpoint that is not there."""
    settings = section(EvaluateSettings, cfg)
    if settings.text is not None and settings.file is not None:
        raise UserError("text= and file= are both a text to measure on; give one of them")
    if settings.file is not None:
        require_there("file", settings.file)
    named: list[str | None] = [*words] or [None]
    folders = [find_run(word, settings.runs) for word in named]
    for folder in folders:
        require_own_files(folder)
    results = [_evaluate(folder, settings) for folder in folders]
    what = results[0]["text"]
    # Shown before it is written: where a run lies on a read-only disk, the figures are there all the same.
    _show([run_name(folder, settings.runs) for folder in folders], results, what, settings.by_position)
    for folder, result in zip(folders, results, strict=True):
        write_json(folder / f"evaluation-{result['kind']}.json", result)


def _evaluate(folder: Path, settings: EvaluateSettings) -> dict[str, Any]:
    # Torch is imported only once the runs are known to exist.
    from softattn_lm.evaluation.device import pick_device
    from softattn_lm.evaluation.measure import measure
    from softattn_lm.training.checkpoint import load_run

    loaded = load_run(folder, settings.checkpoint, pick_device(settings.device))
    if loaded.tokenizer.kind == "symbols":
        return _evaluate_task(loaded, settings)
    kind, text, tokens, n_bytes, documents = _tokens(loaded, settings)
    if len(tokens) < 2:
        said = "text=" if kind == "text" else f"file={text}"
        raise UserError(
            f"{said} has {len(tokens)} token{'' if len(tokens) == 1 else 's'} and needs 2: the first is only read, "
            "and what follows is predicted"
        )
    found = measure(loaded.model, tokens, n_bytes, settings.batch_size, documents)
    return _figures(loaded, settings, kind, text, found)


def _figures(loaded: Any, settings: EvaluateSettings, kind: str, text: str, found: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "text": text,
        "checkpoint": settings.checkpoint,
        "step": loaded.step,
        "vocab_size": loaded.tokenizer.vocab_size,
        "nats_per_token": found.nats_per_token,
        "standard_error": found.standard_error,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "windows": found.windows,
        "stretches": found.stretches(),
        "by_position": found.by_position,
        "cache_bytes_per_token": loaded.model.cache_bytes_per_token(),
        "cache_state_bytes": loaded.model.cache_state_bytes(),
    }


def _evaluate_task(loaded: Any, settings: EvaluateSettings) -> dict[str, Any]:
    """Only answers count as tokens; accuracy of all, by number of pairs and by gap."""
    from softattn_lm.data import prepared_for
    from softattn_lm.data.tasks import FixedSet
    from softattn_lm.evaluation.recall import measure_task

    if settings.text is not None or settings.file is not None:
        given = "text" if settings.text is not None else "file"
        raise UserError(f"this run was trained on a task, which asks its own questions; leave {given}= out")
    prepared = prepared_for(loaded.config, runs_folder(settings.runs) / "cache")
    if prepared.fingerprint != loaded.data["fingerprint"]:
        raise UserError(f"{prepared.source} asks other questions than it did when this run was trained; train it again")
    if settings.split == "train":
        raise UserError("the training data of a task is fresh in every step; type split=validation or split=test")
    fixed = prepared.splits[settings.split]
    assert isinstance(fixed, FixedSet)
    found, pairs, gaps = measure_task(loaded.model, fixed, settings.batch_size)
    figures = _figures(loaded, settings, settings.split, f"{settings.split} split of {prepared.source}", found)
    return figures | {
        "accuracy": found.accuracy,
        "by_pairs": {str(number): share.accuracy for number, share in pairs.items()},
        "by_gap": {gap: share.accuracy for gap, share in gaps.items()},
        # By position only those places are known that are asked about.
        "stretches": {},
        "by_position": [],
    }


def _tokens(loaded: Any, settings: EvaluateSettings) -> tuple[str, str, Any, int, Any]:
    """(kind, name, ids, UTF-8 bytes, where documents begin) of the text, in the tokens of this run."""
    from softattn_lm.config.build import build
    from softattn_lm.data import TextFiles, prepare, prepare_text

    cache = runs_folder(settings.runs) / "cache"
    if settings.text is not None:
        return "text", "the text given", loaded.tokenizer.encode(settings.text), len(settings.text.encode()), None
    if settings.file is not None:
        split = prepare_text(TextFiles(settings.file, setting="file"), loaded.tokenizer, cache)
        return "file", settings.file, split.tokens, split.n_bytes, split.documents
    prepared = prepare(build(loaded.config["data"]), loaded.config["tokenizer"], cache)
    if prepared.fingerprint != loaded.data["fingerprint"]:
        raise UserError(
            f"the text this run was trained on has changed since ({prepared.source}), and its {settings.split} part "
            "may hold what it was trained on; measure on a text of your own with file=..."
        )
    split = prepared.splits[settings.split]
    if split.n_tokens < 2:
        raise UserError(
            f"split={settings.split} of this run's data is empty; type split=validation, or file=... for another text"
        )
    return settings.split, f"{settings.split} split of {prepared.source}", split.tokens, split.n_bytes, split.documents


def with_error(value: float, error: float) -> str:
    """A text of one window has no standard error."""
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"


def _show(names: list[str], results: list[dict[str, Any]], what: str, by_position: bool) -> None:
    from rich.table import Table

    from softattn_lm.training.console import plain_console

    table = Table(
        title=f"loss on the {what}" if results[0]["kind"] in ("train", "validation", "test") else f"loss on {what}"
    )
    table.add_column("")
    for name, result in zip(names, results, strict=True):
        table.add_column(f"{name}\nstep {result['step']}", justify="right", overflow="fold")

    def row(title: str, key: str, shape: str) -> None:
        table.add_row(title, *("" if r[key] is None else format(r[key], shape) for r in results))

    table.add_row("nats per token", *(with_error(r["nats_per_token"], r["standard_error"]) for r in results))
    tasks = [r for r in results if "accuracy" in r]
    if tasks:
        table.add_row("accuracy", *(_share(r.get("accuracy")) for r in results))
        for title, key in (("of {} pairs", "by_pairs"), ("at gap {}", "by_gap")):
            for each in sorted({each for r in tasks for each in r[key]}, key=lambda each: int(each.partition("-")[0])):
                table.add_row(title.format(each), *(_share(r.get(key, {}).get(each)) for r in results))
    row("perplexity", "perplexity", ".3f")
    row("bits per byte", "bits_per_byte", ".4f")
    row("tokens", "tokens", ",d")
    row("cache bytes per token", "cache_bytes_per_token", ",d")
    row("and however many tokens", "cache_state_bytes", ",d")
    table.add_section()
    for title in dict.fromkeys(title for r in results for title in r["stretches"]):
        table.add_row(f"{title} of a window", *(_number(r["stretches"].get(title)) for r in results))
    longest = max(len(r["by_position"]) for r in results)
    if by_position and longest:
        table.add_section()
        for place in sorted({min(longest, 1 << power) for power in range(longest.bit_length() + 1)}):
            positions = (r["by_position"] for r in results)
            table.add_row(
                f"from {place} tokens", *(_number(p[place - 1] if place <= len(p) else None) for p in positions)
            )
    if len({r["vocab_size"] for r in results}) > 1:
        table.caption = "different tokenizers: compare bits per byte, not nats per token"
    plain_console().print(table)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
