"""Random words of 64 bits -> whole numbers, distinct numbers, gaps that follow a power law. Vectorised over sequences.

Every function takes words (B, N) uint64, a row per sequence, and gives a row per sequence, which depends on no other.
"""

import numpy as np


def uniform(words: np.ndarray) -> np.ndarray:
    """In [0, 1), float64, same shape."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(words: np.ndarray, n: int | np.ndarray) -> np.ndarray:
    """0 .. n - 1, each as likely as any other, int64, same shape."""
    return (uniform(words) * n).astype(np.int64)


def distinct(words: np.ndarray, n: int) -> np.ndarray:
    """(B, 2k) -> (B, k): k different numbers of 0 .. n - 1, k <= n, every ordered choice equally likely.

    Robert Floyd's method for the set (Bentley 1987, Communications of the ACM 30:9), then an order.
    """
    k = words.shape[1] // 2
    chosen = np.empty((len(words), k), dtype=np.int64)
    for index, last in enumerate(range(n - k, n)):
        drawn = below(words[:, index], last + 1)
        taken = (chosen[:, :index] == drawn[:, None]).any(1)
        chosen[:, index] = np.where(taken, last, drawn)
    return np.take_along_axis(chosen, np.argsort(words[:, k:], axis=1, kind="stable"), 1)


def power_law_slots(words: np.ndarray, k: int, power: float) -> np.ndarray:
    """(B, N) -> (B, k): k different slots of 0 .. N - 1, drawn one after the other, each slot g that is left with
    probability in proportion to (g + 1)^(power - 1). power 1: all alike; near 0: early ones.

    Clocks of rate p(g) ring in just this order.
    """
    rates = np.arange(1, words.shape[1] + 1, dtype=np.float64) ** (power - 1)
    clocks = -np.log1p(-uniform(words)) / rates
    return np.argsort(clocks, axis=1, kind="stable")[:, :k]


def places_in_order(words: np.ndarray, k: int) -> np.ndarray:
    """(B, N) -> (B, k): k different places of 0 .. N - 1 in rising order, every set equally likely."""
    return np.sort(np.argsort(words, axis=1, kind="stable")[:, :k], axis=1)
