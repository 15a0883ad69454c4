"""How well a model predicts a text: nats per token with their standard error, bits per byte, loss by position.

    nats per token   m = Σ −ln p(token | those before it in its window) / number of predicted tokens
    perplexity       e^m
    bits per byte    m · tokens / (bytes · ln 2): comparable between tokenizers

The standard error treats the text as a sample of texts like it. Neighbouring windows resemble each other, and errors
that assume independent windows come out 1.6 times too small on Tiny Shakespeare. So consecutive windows are put
together in about sqrt(n) blocks, and the error is that of a ratio of block means (batch means; Flegal & Jones 2010,
Annals of Statistics 38).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


@dataclass(frozen=True)
class LikelihoodResult:
    """`by_position[i]`: mean nats at place i of a window (a token predicted from i + 1 tokens). `standard_error` is NaN
    with fewer than two windows, `bits_per_byte` None where the number of bytes is not known."""

    nats_per_token: float
    standard_error: float
    bits_per_byte: float | None
    tokens: int
    windows: int
    by_position: list[float]
    accuracy: float | None = None  # share of the answers of a task that are right; None for text

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    def stretches(self) -> dict[str, float]:
        """The loss where a window begins, in its four quarters and where it ends: what more context is worth."""
        n = len(self.by_position)
        found = {"first": self.by_position[0]}
        if n >= 4:
            for quarter in range(4):
                part = self.by_position[quarter * n // 4 : (quarter + 1) * n // 4]
                found[f"quarter {quarter + 1}"] = sum(part) / len(part)
        found["last"] = self.by_position[-1]
        return found


class Likelihood:
    """Adds up batches of whole windows; `result` may be asked once all are in.

    Sums stay on the device of the logits until then: no batch waits for the one before. task: the likeliest symbol at
    each place that is asked about is compared with the answer, too.
    """

    def __init__(self, task: bool = False) -> None:
        self.task = task
        self._right: list[Tensor] = []  # (B, T) bool per batch
        self._nats: list[Tensor] = []  # (B,) per batch
        self._counts: list[Tensor] = []
        self._places: list[Tensor] = []  # of the windows, in reading order
        self._nats_by_position: Tensor | None = None
        self._counts_by_position: Tensor | None = None

    def add(self, logits: Tensor, targets: Tensor, first: int | None = None) -> None:
        """logits (B, T, V), targets (B, T) int64 with -100 where nothing is predicted.

        first: how many windows of the text stand before these; None: those that were added before.
        """
        before = sum(len(places) for places in self._places) if first is None else first
        self._places.append(torch.arange(before, before + len(targets)))
        nats = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(targets)  # (B, T), 0 where ignored
        if nats.device.type != "mps":  # which has no float64
            nats = nats.double()
        counted = (targets != IGNORED).to(nats.dtype)
        if self.task:
            self._right.append((logits.argmax(-1) == targets) & (targets != IGNORED))
        self._nats.append(nats.sum(1))
        self._counts.append(counted.sum(1))
        if self._nats_by_position is None or self._counts_by_position is None:
            self._nats_by_position, self._counts_by_position = nats.sum(0), counted.sum(0)
        else:
            self._nats_by_position += nats.sum(0)
            self._counts_by_position += counted.sum(0)

    def windows(self) -> dict[str, np.ndarray]:
        """Sums per window, in the order in which they were added, and per place: {"nats", "tokens"} (W,) and
        {"position_nats", "position_tokens"} (T,)."""
        assert self._nats_by_position is not None and self._counts_by_position is not None, "no batch was added"
        return {
            "nats": torch.cat(self._nats).double().cpu().numpy(),
            "tokens": torch.cat(self._counts).cpu().numpy().astype(np.int64),
            "position_nats": self._nats_by_position.double().cpu().numpy(),
            "position_tokens": self._counts_by_position.cpu().numpy().astype(np.int64),
        }

    def right(self) -> np.ndarray:
        """(W, T) bool: the answers of a task that are right, in the order in which windows were added."""
        return torch.cat(self._right).cpu().numpy()

    def result(
        self, bytes_per_token: float | None = None, reduce: Callable[[Tensor], Tensor] | None = None
    ) -> LikelihoodResult:
        """`reduce` adds a float64 vector up over ranks, each of which has seen other windows of the same text and T.

        The ranks' windows are put together in reading order before the error is computed, so that it does not depend
        on how many ranks there are.
        """
        assert self._nats_by_position is not None and self._counts_by_position is not None, "no batch was added"
        nats, counts = torch.cat(self._nats).cpu().double(), torch.cat(self._counts).cpu().double()
        # A rank that has run out of text keeps step with the others on windows in which nothing is predicted.
        real = counts > 0
        n_windows = real.sum().double()[None]
        if reduce is not None:
            n_windows = reduce(n_windows)
        windows = round(n_windows.item())
        right = torch.cat([part.sum(1) for part in self._right]).cpu().double() if self.task else torch.zeros_like(nats)
        per_window = torch.zeros(3, windows, dtype=torch.float64)
        per_window[:, torch.cat(self._places)[real]] = torch.stack((nats, counts, right))[:, real]
        by_position = torch.stack((self._nats_by_position, self._counts_by_position)).cpu().double()
        packed = torch.cat((per_window.flatten(), by_position.flatten()))
        if reduce is not None:
            packed = reduce(packed)  # every window has been seen by one rank and is zero on the others
        nats, counts, right = packed[: 3 * windows].view(3, windows)
        by_nats, by_counts = packed[3 * windows :].view(2, -1)
        s, c = _blocks(nats), _blocks(counts)
        total = c.sum().item()
        mean = s.sum().item() / total
        squares = (s - mean * c).square().sum().item()
        error = math.sqrt(squares * len(s) / (len(s) - 1)) / total if len(s) > 1 else math.nan
        seen = by_counts > 0
        return LikelihoodResult(
            nats_per_token=mean,
            standard_error=error,
            bits_per_byte=None if bytes_per_token is None else mean / (bytes_per_token * math.log(2.0)),
            tokens=round(total),
            windows=windows,
            by_position=(by_nats[seen] / by_counts[seen]).tolist(),
            accuracy=right.sum().item() / total if self.task else None,
        )


def _blocks(per_window: Tensor) -> Tensor:
    """Sums over about sqrt(n) runs of consecutive windows; each window its own block below 16."""
    n = len(per_window)
    if n == 0:
        return per_window
    size = 1 if n < 16 else round(math.sqrt(n))
    return torch.stack([block.sum() for block in per_window.split(size)])
