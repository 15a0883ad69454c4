"""The prepared data of a run: where it comes from, what it opens with, and whether it is still what a run was saved
with. No Lightning here."""

from __future__ import annotations

from typing import Any

from softattn_lm.config.build import build
from softattn_lm.data import Prepared, Split, prepared_for
from softattn_lm.errors import UserError
from softattn_lm.runs.names import runs_folder
from softattn_lm.training.budget import max_steps
from softattn_lm.training.describe import describe


def prepared_data(cfg: dict[str, Any]) -> Prepared:
    return prepared_for(cfg, runs_folder(cfg["runs"]) / "cache")


def described(cfg: dict[str, Any]) -> dict[str, Any]:
    """The sizes of what `cfg` would train; only the tokenizer needs the data."""
    prepared = prepared_data(cfg)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=cfg["seed"])
    return describe(model, cfg["batch_size"], steps)


def opening(prepared: Prepared) -> list[int]:
    """The first tokens that were held back from training, or of the training text if none were."""
    held_back = prepared.splits["validation"]
    return (held_back if held_back.n_tokens else prepared.splits["train"]).tokens[:64].tolist()


def validation_fingerprints(prepared: Prepared) -> dict[str, str]:
    """Of the validation sets beside the text, which have token files of their own."""
    paths = {name: split.path.parent for name, split in prepared.splits.items() if isinstance(split, Split)}
    return {name: place.name for name, place in paths.items() if place != prepared.folder}


def require_same_text(own: dict[str, Any], prepared: Prepared, name: str) -> None:
    """`own`: "softattn" of the run's checkpoint."""
    if own["data"]["fingerprint"] != prepared.fingerprint:
        raise UserError(
            f"the text of run {name} has changed since it was saved, so it cannot be continued; start a new run"
        )
    before, now = own.get("validation_sets", {}), validation_fingerprints(prepared)
    other = sorted(key for key in before if before[key] != now.get(key))
    if other:
        raise UserError(
            f"the validation set {other[0]} of run {name} has changed since it was saved, and its losses would no "
            "longer be of one text; put the old text back, or start a new run"
        )
