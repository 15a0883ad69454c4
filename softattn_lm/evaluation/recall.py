"""How many answers of a task are right, counted over its windows; what is made of the counts is in shares.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from softattn_lm.data.tasks.base import FixedSet, Sequences, TaskWindows
from softattn_lm.data.windows import PADDED
from softattn_lm.evaluation.likelihood import Likelihood, LikelihoodResult
from softattn_lm.evaluation.watching import evaluating
from softattn_lm.shares import Share, by_gap, by_pairs

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM


def by_window(right: np.ndarray, sequences: Sequences) -> dict[str, np.ndarray]:
    """right (W, T) bool -> {"correct", "answers", "pairs"} (W,) and {"gap_from", "gap_correct", "gap_answers"} (G,) of
    the gaps that there are; all int64.
    """
    asked = sequences.y != PADDED
    bins = np.log2(np.maximum(1, sequences.gaps[asked])).astype(np.int64)  # exact: a float64 of a power of 2 is
    answers, correct = np.bincount(bins), np.bincount(bins, weights=right[asked]).astype(np.int64)
    there = np.flatnonzero(answers)
    return {
        "correct": (right & asked).sum(1),
        "answers": asked.sum(1),
        "pairs": sequences.pairs,
        "gap_from": 2**there,
        "gap_correct": correct[there],
        "gap_answers": answers[there],
    }


def measure_task(
    model: DecoderLM, fixed: FixedSet, batch_size: int
) -> tuple[LikelihoodResult, dict[int, Share], dict[str, Share]]:
    """(loss over answers and accuracy, by pairs, by gap). The model gets its mode back."""
    device, likelihood = model.embed.weight.device, Likelihood(task=True)
    windows = TaskWindows(fixed, batch_size)
    with evaluating(model):
        for index in range(len(windows)):
            x, y = (torch.from_numpy(array).to(device) for array in windows[index])
            likelihood.add(model(x), y)
    found = by_window(likelihood.right(), fixed.sequences)
    return likelihood.result(), by_pairs(found), by_gap(found)
