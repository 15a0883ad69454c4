"""How well counting predicts a text: n-grams with interpolated Kneser-Ney smoothing, the scale for a table of losses.

    P_k(w | c) = max(N(cw) - D, 0) / N(c·)  +  D · T(c) / N(c·) · P_(k-1)(w | c without its first token),   P_0 = 1 / V

c: the k - 1 tokens before w; T(c): how many different tokens follow c; D = n1 / (n1 + 2 n2), of the n-grams seen once
and twice, or 1/2 if none was seen once. N counts occurrences at the highest order, and below it how many different
tokens precede an n-gram.
Kneser & Ney 1995 (ICASSP); Chen & Goodman 1999, Computer Speech & Language 13, section 2.7.
"""

from dataclasses import dataclass

import numpy as np

UNSEEN = -1


@dataclass(frozen=True)
class Grams:
    """The different n-grams of a text, numbered. codes (G,) rising: number of the (n - 1)-gram that begins it, times V,
    plus its last token. suffix (G,): the number of each without its first token, among those one shorter. counts (G,).
    """

    codes: np.ndarray
    suffix: np.ndarray
    counts: np.ndarray


class NGrams:
    """Counts of orders 1 .. `order` of `tokens` (n,), ids below `vocab_size`."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = 6) -> None:
        if order < 1 or len(tokens) < order:
            raise ValueError(f"n-grams of order {order} need an order of 1 or more and as many tokens")
        self.vocab_size, self.order = vocab_size, order
        self.levels: list[Grams] = []
        tokens = np.asarray(tokens, dtype=np.int64)
        shorter = np.zeros(len(tokens) + 1, dtype=np.int64)  # number of the n-gram that ends at each place
        for k in range(1, order + 1):
            # Places k - 1 .. n - 1 end an n-gram of order k; `shorter` holds those of order k - 1 from place k - 2 on.
            codes, first, numbers, counts = np.unique(
                shorter[:-1] * vocab_size + tokens[k - 1 :], return_index=True, return_inverse=True, return_counts=True
            )
            self.levels.append(Grams(codes, shorter[1:][first], counts))
            shorter = numbers

    def probabilities(self, tokens: np.ndarray, order: int) -> np.ndarray:
        """(n,) float64: P_order of each token of another text given those before it; at its beginning of fewer."""
        tokens = np.asarray(tokens, dtype=np.int64)
        found = np.full(len(tokens), 1.0 / self.vocab_size)
        context = np.zeros(len(tokens), dtype=np.int64)  # number of the n-gram before each token
        for k in range(1, order + 1):
            level = self.levels[k - 1]
            counts = level.counts if k == order else self._continuations(k)
            gram = self._numbers(level, context, tokens)
            owner = level.codes // self.vocab_size  # (G,) the context of each n-gram
            total, different = np.bincount(owner, counts), np.bincount(owner, counts > 0)
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            discount = once / (once + 2 * twice) if once else 0.5  # 0 would leave nothing for what never followed
            known = np.flatnonzero((context != UNSEEN) & (np.arange(len(tokens)) >= k - 1))
            known = known[total[context[known]] > 0]
            here, seen = context[known], gram[known] != UNSEEN
            kept = np.where(seen, np.maximum(counts[gram[known]] - discount, 0.0), 0.0)
            found[known] = (kept + discount * different[here] * found[known]) / total[here]
            context = np.concatenate(([UNSEEN], gram[:-1]))
        return found

    def losses(self, tokens: np.ndarray, context: int) -> dict[int, float]:
        """See `ngram_losses`; `tokens`: what is held back."""
        orders = range(1, self.order + 1)
        nats = -np.log([self.probabilities(tokens, k)[1:] for k in orders])  # (order, n - 1)
        place = np.arange(nats.shape[1])
        seen = 1 + place % context  # tokens of the window before each
        return {k: float(nats[np.minimum(k, seen + 1) - 1, place].mean()) for k in orders}

    def _continuations(self, k: int) -> np.ndarray:
        """(G,): how many different tokens precede each n-gram of order k."""
        return np.bincount(self.levels[k].suffix, minlength=len(self.levels[k - 1].codes))

    def _numbers(self, level: Grams, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """(n,) number of the n-gram that ends at each place, or UNSEEN."""
        codes = context * self.vocab_size + tokens
        place = np.minimum(np.searchsorted(level.codes, codes), len(level.codes) - 1)
        return np.where((context != UNSEEN) & (level.codes[place] == codes), place, UNSEEN)


def ngram_losses(
    train: np.ndarray, held_back: np.ndarray, vocab_size: int, context: int, order: int = 6
) -> dict[int, float]:
    """order -> nats per token on the windows that a model of this context is measured on: each token but the first,
    from those before it in its window (see `ValidationWindows`), with a shorter n-gram where a window begins.
    """
    return NGrams(train, vocab_size, order).losses(held_back, context)
