"""Multi-query associative recall: pairs of a key and its value, then the keys again, each asking for its value.

Arora et al. 2023, arXiv:2312.04927, section 3 and appendix E. Symbol 0 is blank, keys are 1 .. V/2 - 1, values are
V/2 .. V - 1; in a sequence all keys differ, and so do all values. 2 pairs, 16 tokens, V = 12:

    x   k1 v2 k3 v1 _  _  k3 _  _  _  _  _  k1 _  _  _
    y   .  .  .  .  .  .  v1 .  .  .  .  .  v2 .  .  .          '.' is -100: only answers carry loss

A key is asked about in one of the (T - 2·pairs)/2 slots behind the pairs, two tokens wide; slot g has probability in
proportion to (g + 1)^(power - 1), without two questions in one slot.
"""

from typing import Any, Literal

import numpy as np

from softattn_lm.data.tasks.base import Sequences, Task
from softattn_lm.data.tasks.draws import below, distinct, places_in_order, power_law_slots
from softattn_lm.errors import UserError


class Recall(Task):
    """n_pairs: of a sequence, or a list of numbers of which each sequence has one, all equally likely.

    filler: what stands where nothing else does, the blank or any symbol at random (keys and values of the sequence too,
    so that some questions have two answers).
    """

    name = "recall"
    updates = 0  # keys that get a second value
    noise = 0  # noise tokens among the pairs
    noise_symbols = 0

    def __init__(
        self,
        n_pairs: int | list[int] = 4,
        length: int | None = None,
        vocab_size: int = 256,
        power: float = 0.01,
        filler: Literal["blank", "random"] = "blank",
        validation_sequences: int = 500,
        test_sequences: int = 1000,
    ) -> None:
        super().__init__(length, vocab_size, validation_sequences, test_sequences)
        self.n_pairs = [n_pairs] if isinstance(n_pairs, int) else sorted(n_pairs)
        if not self.n_pairs or self.n_pairs[0] < 1:
            raise UserError(f"data.n_pairs={n_pairs}: a sequence has one pair or more; type data.n_pairs=4")
        if not 0 < power < float("inf"):
            raise UserError(f"data.power={power}: data.power must be above 0 and finite")
        self.power, self.filler = power, filler

    @property
    def n_keys(self) -> int:
        return (self.vocab_size - self.noise_symbols) // 2 - 1

    @property
    def n_values(self) -> int:
        return self.vocab_size - self.noise_symbols - self.n_keys - 1

    def groups(self) -> list[tuple[str, int]]:
        noise = [("n", self.noise_symbols)] if self.noise_symbols else []
        return [("_", 1), ("k", self.n_keys), ("v", self.n_values), *noise]

    def settings(self) -> dict[str, Any]:
        return {
            "n_pairs": self.n_pairs, "vocab_size": self.vocab_size, "power": self.power, "filler": self.filler,
            "updates": self.updates, "noise": self.noise, "noise_symbols": self.noise_symbols,
        }  # fmt: skip

    def context_tokens(self, pairs: int) -> int:
        """Of the part in front of the questions."""
        return 2 * (pairs + self.updates) + self.noise

    def require_room(self, length: int) -> None:
        most = self.n_pairs[-1]
        needed = self.context_tokens(most) + 2 * most
        if needed > length:
            raise UserError(
                f"data={self.name} with {most} pairs takes {needed} tokens, of which 2 for each question, but "
                f"model.context={length}; type model.context={needed}, or fewer data.n_pairs"
            )
        values = most + self.updates
        if self.n_keys < max(2, most) or self.n_values < max(2, values):
            least = 2 * max(2, values) + 2 + self.noise_symbols
            raise UserError(
                f"data.vocab_size={self.vocab_size} has {max(0, self.n_keys)} keys and {max(0, self.n_values)} values, "
                f"too few for {most} pairs that differ; type data.vocab_size={least} or more"
            )

    def words(self, length: int) -> int:
        most = self.n_pairs[-1]
        space = max((length - self.context_tokens(pairs)) // 2 for pairs in self.n_pairs)
        bound = most + self.updates
        starts = bound + self.noise if self.noise else 0
        filled = length if self.noise or self.filler == "random" else 0
        return 1 + 2 * most + 2 * bound + 2 * self.updates + space + starts + filled

    def make(self, words: np.ndarray, length: int) -> Sequences:
        which = below(words[:, 0], len(self.n_pairs))
        found = Sequences.empty(len(words), length)
        for index, pairs in enumerate(self.n_pairs):
            rows = np.flatnonzero(which == index) if len(self.n_pairs) > 1 else np.arange(len(words))
            part = self._make(words[rows, 1:], length, pairs)
            found.x[rows], found.y[rows], found.gaps[rows], found.pairs[rows] = part.x, part.y, part.gaps, pairs
        return found

    def _make(self, words: np.ndarray, length: int, pairs: int) -> Sequences:
        taken = 0

        def next_words(count: int) -> np.ndarray:
            nonlocal taken
            taken += count
            return words[:, taken - count : taken]

        found = Sequences.empty(len(words), length)
        context, bound = self.context_tokens(pairs), pairs + self.updates
        rows = np.arange(len(words))[:, None]
        keys = 1 + distinct(next_words(2 * pairs), self.n_keys)  # (B, n)
        values = 1 + self.n_keys + distinct(next_words(2 * bound), self.n_values)  # (B, n + updates), all different
        again = distinct(next_words(2 * self.updates), pairs)  # (B, updates) which keys are bound once more
        slots = power_law_slots(next_words((length - context) // 2), pairs, self.power)  # (B, n)
        places = next_words(bound + self.noise if self.noise else 0)
        starts = self._starts(places, bound, len(words))  # (B, n + updates)

        found.x[rows, starts] = np.concatenate((keys, np.take_along_axis(keys, again, 1)), 1)
        found.x[rows, starts + 1] = values
        last = np.tile(np.arange(pairs), (len(words), 1))  # (B, n) which binding of each key is its last
        np.put_along_axis(last, again, np.arange(pairs, bound)[None], 1)
        questions = context + 2 * slots
        found.x[rows, questions] = keys
        found.y[rows, questions] = np.take_along_axis(values, last, 1)
        found.gaps[rows, questions] = questions - (np.take_along_axis(starts, last, 1) + 1)
        free = found.x == 0
        if self.noise:
            drawn = self.vocab_size - self.noise_symbols + below(next_words(length), self.noise_symbols)
            found.x[free] = drawn[free]
        elif self.filler == "random":
            found.x[free] = below(next_words(length), self.vocab_size)[free]
        return found

    def _starts(self, words: np.ndarray, bound: int, count: int) -> np.ndarray:
        """(B, bound): where each pair stands; noise tokens stand between them."""
        if not self.noise:
            return np.tile(2 * np.arange(bound), (count, 1))
        return places_in_order(words, bound) + np.arange(bound)  # each pair before is a token longer than its place


class Forget(Recall):
    """Recall in which `updates` of the keys are bound once more, to another value, behind all first bindings: the last
    value counts.
    """

    name = "forget"

    def __init__(
        self,
        n_pairs: int | list[int] = 4,
        updates: int = 2,
        length: int | None = None,
        vocab_size: int = 256,
        power: float = 0.01,
        filler: Literal["blank", "random"] = "blank",
        validation_sequences: int = 500,
        test_sequences: int = 1000,
    ) -> None:
        super().__init__(n_pairs, length, vocab_size, power, filler, validation_sequences, test_sequences)
        if not 1 <= updates <= self.n_pairs[0]:
            raise UserError(
                f"data.updates={updates}: 1 to {self.n_pairs[0]} keys can be bound once more, as many as there are in "
                f"a sequence; type data.updates={self.n_pairs[0]}"
            )
        self.updates = updates


class NoisyRecall(Recall):
    """Recall with `noise` tokens at random among the pairs (never between a key and its value) and in place of every
    blank. Noise has `noise_symbols` symbols of its own. After Poli et al. 2024, arXiv:2403.17844, section 3.1.
    """

    name = "noisy_recall"

    def __init__(
        self,
        n_pairs: int | list[int] = 4,
        noise: int = 16,
        noise_symbols: int = 16,
        length: int | None = None,
        vocab_size: int = 256,
        power: float = 0.01,
        validation_sequences: int = 500,
        test_sequences: int = 1000,
    ) -> None:
        super().__init__(n_pairs, length, vocab_size, power, "blank", validation_sequences, test_sequences)
        for setting, value, least in (("noise", noise, 1), ("noise_symbols", noise_symbols, 2)):
            if value < least:
                raise UserError(f"data.{setting}={value}: data.{setting} must be at least {least}")
        self.noise, self.noise_symbols = noise, noise_symbols
