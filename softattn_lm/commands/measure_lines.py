"""What the table of a text has beside its arms, worked out where the baseline is measured: see ablation/lines.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softattn_lm.config.stored import require_harmless
from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json

ORDER = 6
COUNTED = 5_000_000  # tokens at most, of the training text and of what is held back: 12 s of a core, and 1.3 GiB


def write_lines(cfg: dict[str, Any], asked: dict[str, Any]) -> None:
    """asked: {"out": file, "words", "uniform": the reference's config or None, "refused": why it is None, "counted":
    files like `out` that may be there and have the same counts}.
    """
    from softattn_lm.data.tasks import FixedSet
    from softattn_lm.training.prepared import prepared_data

    prepared = prepared_data(cfg)
    found: dict[str, Any] = {"words": asked["words"], "fingerprint": prepared.fingerprint, "text": False}
    if not any(isinstance(split, FixedSet) for split in prepared.splits.values()):
        found |= {"text": True, "refused": asked["refused"] or _refused(asked["uniform"], prepared, asked["out"])}
        found["context"] = cfg["model"]["context"]
        found |= _counted_before(asked["counted"], found) or counted(prepared, found["context"])
    write_json(Path(asked["out"]), found)


def _counted_before(files: Sequence[str], found: dict[str, Any]) -> dict[str, Any]:
    """What `counted` gives, of a file about the same text and windows; {} where there is none."""
    for file in (file for file in map(Path, files) if file.is_file()):
        known = json.loads(file.read_text(encoding="utf-8"))
        if all(known.get(key) == found[key] for key in ("fingerprint", "context")) and "order" in known:
            return {key: known[key] for key in ("order", "validation", "test")}
    return {}


def counted(prepared: Any, context: int) -> dict[str, Any]:
    """{"order", "validation": {name: nats}, "test": ..}; of the order that predicts the validation part best, on the
    windows that a model of this context is scored on. {} where a part is missing, or too long to be counted.
    """
    from softattn_lm.evaluation.ngram import NGrams

    parts = [prepared.splits.get(name) for name in ("train", "validation", "test")]
    if any(part is None or part.n_tokens < 2 for part in parts) or max(p.n_tokens for p in parts[1:]) > COUNTED:
        return {}
    train, validation, test = (part.tokens for part in parts)
    grams = NGrams(train[:COUNTED], prepared.tokenizer.vocab_size, min(ORDER, len(train)))
    losses = grams.losses(validation, context)
    order = min(losses, key=losses.__getitem__)
    name = f"{order}-gram" + (f" of the first {COUNTED // 10**6}M tokens" if len(train) > COUNTED else "")
    on_test = grams.losses(test, context)[order]
    return {"order": order, "validation": {name: losses[order]}, "test": {name: on_test}}


def _refused(cfg: dict[str, Any], prepared: Any, file: str) -> str | None:
    """Why the baseline with the uniform kernel cannot be built."""
    from softattn_lm.config.build import build

    require_harmless(cfg, file)
    try:
        build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=cfg["seed"])
    except UserError as error:
        return str(error)
    return None
