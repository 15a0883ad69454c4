"""How many answers of a task are right, by the number of pairs in the sequence and by gap, out of what is counted per
window (evaluation/recall.py). numpy only: reports read score files without torch.

A gap is how many tokens before the question its answer stands. Bins double: 1, 2-3, 4-7, 8-15, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """`correct` of `answers` are right."""

    correct: int
    answers: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.answers


def by_pairs(found: Mapping[str, np.ndarray]) -> dict[int, Share]:
    """From "correct", "answers" and "pairs" (W,): number of pairs -> share."""
    shares = {}
    for pairs in np.unique(found["pairs"]):
        here = found["pairs"] == pairs
        shares[int(pairs)] = Share(int(found["correct"][here].sum()), int(found["answers"][here].sum()))
    return shares


def by_gap(found: Mapping[str, np.ndarray]) -> dict[str, Share]:
    """From "gap_from", "gap_correct" and "gap_answers" (G,): "4-7" -> share."""
    return {
        "1" if first == 1 else f"{int(first)}-{2 * int(first) - 1}": Share(int(correct), int(answers))
        for first, correct, answers in zip(found["gap_from"], found["gap_correct"], found["gap_answers"], strict=True)
    }
