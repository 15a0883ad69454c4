"""What the final weights say about each window of a split, for those who compare runs window by window.

    <run>/scores/<split>.npz
        nats (W,)  summed over each window, in reading order      tokens (W,)  predicted in it
        position_nats (T,), position_tokens (T,)                  the same by place in a window
    and of a task
        correct (W,), answers (W,)   how many are right, of how many that are asked for
        pairs (W,)                   what a window asks to be kept in mind
        gap_from, gap_correct, gap_answers (G,)     the same by gap; bin i holds gaps from gap_from[i] on

Scored on the first rank alone, in float32: what a run is compared by depends on no device count. A validation that has
been just that, on the same windows with the same weights, is not done a second time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from softattn_lm.data import Prepared
from softattn_lm.data.module import ValidationBatches
from softattn_lm.data.tasks import FixedSet
from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import Likelihood
from softattn_lm.evaluation.recall import by_window
from softattn_lm.evaluation.watching import evaluating

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM

FOLDER = "scores"


def require_scorable(names: Sequence[str], prepared: Prepared) -> None:
    """Raises UserError for a split that is asked for and holds nothing to predict."""
    for name in names:
        if name not in prepared.splits or prepared.splits[name].n_tokens < 2:
            setting = {"validation": "data.val_fraction", "test": "data.test_fraction"}[name]
            raise UserError(
                f"training.score names {name}, but this data has no {name} part; type {setting}=0.1, or leave "
                f"{name} out of training.score"
            )


def write_scores(
    model: DecoderLM,
    prepared: Prepared,
    names: Sequence[str],
    folder: Path,
    batch_size: int,
    seen: Mapping[str, Likelihood] | None = None,
) -> dict[str, dict[str, Any]]:
    """Scores each split, writes its file, and returns for each {"loss", "loss_se", "accuracy", "tokens"}.

    loss: nats per predicted token. accuracy: of the answers of a task; None for text. The model gets its mode back.
    seen: splits all of whose windows have been scored with these weights already, in reading order.
    """
    found = {}
    for name in names:
        likelihood = (seen or {}).get(name)
        if likelihood is None:
            likelihood = score(model, prepared, name, batch_size)
        arrays, figures = summed_up(likelihood, prepared, name)
        _write(folder / FOLDER / f"{name}.npz", arrays)
        found[name] = figures
    return found


def score(model: DecoderLM, prepared: Prepared, name: str, batch_size: int) -> Likelihood:
    """Of all windows of one split; `batch_size` windows at once, which changes nothing else."""
    split = prepared.splits[name]
    batches = ValidationBatches(split, model.context, batch_size, 0, 1, model.packs_documents)
    device, likelihood = model.embed.weight.device, Likelihood(isinstance(split, FixedSet))
    with evaluating(model):
        for index in range(len(batches)):
            x, y, *documents = (tensor.to(device) for tensor in batches[index])
            logits = model(x, documents=documents[0] if documents else None)
            likelihood.add(logits, y)
    return likelihood


def summed_up(likelihood: Likelihood, prepared: Prepared, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(the arrays of the file, figures) of one split."""
    split, arrays, result = prepared.splits[name], likelihood.windows(), likelihood.result()
    if isinstance(split, FixedSet):
        arrays |= by_window(likelihood.right(), split.sequences)
    figures = {"loss": result.nats_per_token, "loss_se": result.standard_error, "accuracy": result.accuracy}
    return arrays, figures | {"tokens": result.tokens}


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A reader sees the old file, the new one or none."""
    path.parent.mkdir(exist_ok=True)
    waiting = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    waiting.unlink(missing_ok=True)
    try:
        with waiting.open("xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's own annotation wants a bool in **kwds
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)
