"""Windows of a token file. Sample j of the training stream is a pure function of (seed, j), whoever asks for it.

permuted: epoch e has K = max(1, (n - T) // T) windows of T + 1 tokens, at p, p + T, ..., p + (K-1)T with a phase
0 <= p < n - KT drawn for the epoch; it visits each once, in an order drawn for the epoch. So sample j is window
order_e[j - eK] of epoch e = j // K. Neighbours share one token: it is the last target of one and the first input of the
other. There are T to 2T - 1 phases (fewer if n < 2T): the smallest range that gives every cut modulo T and lets every
token of the text, the last ones too, be read.

random: every start 0 <= s < n - T is as likely as any other, with replacement (nanoGPT's way).

Draws are raw words of Philox and SeedSequence, whose streams numpy guarantees across versions.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from softattn_lm.errors import UserError

PHASE, ORDER, RANDOM = 1, 2, 3  # which draw a stream is for
PADDED = -100  # the target that torch's cross entropy leaves out
WORDS_PER_COUNT = 4  # 64-bit words that Philox makes of one value of its counter


class TrainWindows:
    """`tokens` (n,), `context` T. Raises UserError if the text has fewer than T + 1 tokens."""

    def __init__(
        self, tokens: np.ndarray, context: int, seed: int, sampling: Literal["permuted", "random"] = "permuted"
    ) -> None:
        n = len(tokens)
        if n < context + 1:
            raise UserError(
                f"the training text has {n} tokens, but model.context={context} needs at least {context + 1}; "
                f"use model.context={max(1, n - 1)} or less, or more text"
            )
        if seed < 0:
            raise UserError(f"seed={seed} is negative; use seed=0 or more")
        self.tokens = tokens
        self.context = context
        self.seed = seed
        self.sampling = sampling
        self.per_epoch = max(1, (n - context) // context)  # K, windows
        self.phases = n - self.per_epoch * context
        self._random_key = stream_key(seed, RANDOM)
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> np.ndarray:
        """(count, T + 1) int64: samples first .. first + count - 1."""
        return self.tokens[self.places(first, count)].astype(np.int64)

    def places(self, first: int, count: int) -> np.ndarray:
        """(count, T + 1) int64: where in the text the tokens of these samples stand."""
        samples = np.arange(first, first + count, dtype=np.int64)
        starts = self._random(first, count) if self.sampling == "random" else self._permuted(samples)
        return starts[:, None] + np.arange(self.context + 1)

    def _random(self, first: int, count: int) -> np.ndarray:
        """(count,) starts. Sample j is word j of one counter-based stream, so nothing before it has to be drawn."""
        skip = first % WORDS_PER_COUNT
        generator = np.random.Philox(counter=first // WORDS_PER_COUNT, key=self._random_key)
        words = generator.random_raw(skip + count)[skip:]
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        return (uniform * (len(self.tokens) - self.context)).astype(np.int64)

    def _permuted(self, samples: np.ndarray) -> np.ndarray:
        """(count,) starts, epoch by epoch."""
        epochs, places = np.divmod(samples, self.per_epoch)
        starts = np.empty_like(samples)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if len(samples) else ():
            here = epochs == epoch
            starts[here] = self.phase(epoch) + self.order(epoch)[places[here]] * self.context
        return starts

    def phase(self, epoch: int) -> int:
        """The first start of this epoch."""
        return int(stream_key(self.seed, PHASE, epoch)[0]) % self.phases

    def order(self, epoch: int) -> np.ndarray:
        """(K,) the order of this epoch's windows."""
        if epoch != self._epoch:
            words = np.random.Philox(key=stream_key(self.seed, ORDER, epoch)).random_raw(self.per_epoch)
            self._epoch, self._order = epoch, np.argsort(words, kind="stable")
        return self._order


def stream_key(seed: int, *words: int) -> np.ndarray:
    """(2,) uint64 for one stream."""
    return np.random.SeedSequence([seed, *words]).generate_state(2, np.uint64)


class ValidationWindows:
    """Every token but the first is predicted exactly once, in order: window k predicts tokens kT+1 .. kT+T.

    n tokens, T=4, n=11:   x 0 1 2 3 | 4 5 6 7 | 8 9 . .
                           y 1 2 3 4 | 5 6 7 8 | 9 10 . .      '.' is 0 in x and -100 in y

    Batch i holds windows iB .. iB + B - 1 (the last one may have fewer). Rank r of R gets batches r, r + R, ...; all
    ranks get equally many, because they step together: one that runs out gets a window with no target at all.
    Raises UserError if there is nothing to predict.
    """

    def __init__(self, tokens: np.ndarray, context: int, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        if len(tokens) < 2:
            raise UserError(
                f"a validation text of {len(tokens)} tokens has nothing to predict; use a longer one or a larger "
                "data.val_fraction (0 for none)"
            )
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        self.rank, self.ranks = rank, ranks
        self.n_windows = -(-(len(tokens) - 1) // context)

    def __len__(self) -> int:
        """Batches of this rank."""
        return -(-self.n_windows // (self.batch_size * self.ranks))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """x, y: (B, T) int64 each."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = (index * self.ranks + self.rank) * self.batch_size
        count = max(1, min(self.batch_size, self.n_windows - first))
        begin = first * self.context
        block = np.asarray(self.tokens[begin : begin + count * self.context + 1], dtype=np.int64)
        x = np.zeros(count * self.context, dtype=np.int64)
        y = np.full(count * self.context, PADDED, dtype=np.int64)
        n = max(0, len(block) - 1)
        x[:n], y[:n] = block[:n], block[1:][:n]
        return x.reshape(count, self.context), y.reshape(count, self.context)

    def places(self, index: int) -> np.ndarray:
        """(B, T) int64: where in the text the tokens of x stand; padding stands behind its end."""
        first = (index * self.ranks + self.rank) * self.batch_size
        count = max(1, min(self.batch_size, self.n_windows - first))
        return first * self.context + np.arange(count * self.context).reshape(count, self.context)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[index] for index in range(len(self)))


def document_numbers(documents: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Which document the token at each place belongs to: 0 before the first start in `documents`, then 1, 2, ..."""
    return np.searchsorted(documents, places, side="right").astype(np.int64)


def validation_windows(
    tokens: np.ndarray, context: int, batch_size: int, rank: int = 0, ranks: int = 1
) -> ValidationWindows:
    """See `ValidationWindows`; iterable, with a length."""
    return ValidationWindows(tokens, context, batch_size, rank, ranks)
