"""Copying: repeat what stood before, all of it, what was not blank, or what followed a symbol when it came last.

induction, kind=repeat   x  a b c d a b c d     every token of the second half asks for its successor in the first:
                         y  . . . . b c d .     Olsson et al. 2022, arXiv:2209.11895
           kind=pair     x  c a b d c d d a     the last token asks what followed it before:
                         y  . . . . . . . b     Fu et al. 2022, arXiv:2212.14052, section 3.1
copy,      kind=plain    x  a b c _ | a b       what is behind | is the copy, of which each token asks for the next
                         y  . . . . a b c
           kind=selective  x  a _ b c | a b     the same with the symbols anywhere among the blanks:
                         y  . . . . a b c       Gu & Dao 2023, arXiv:2312.00752, section 3.1
"""

from typing import Any, Literal

import numpy as np

from softattn_lm.data.tasks.base import Sequences, Task
from softattn_lm.data.tasks.draws import below, distinct, places_in_order
from softattn_lm.errors import UserError

BLANK, BEGIN = 0, 1


class Induction(Task):
    """In kind=repeat the tokens of a half all differ, in kind=pair only the one that comes back is rare."""

    name = "induction"

    def __init__(
        self,
        kind: Literal["repeat", "pair"] = "repeat",
        length: int | None = None,
        vocab_size: int = 256,
        validation_sequences: int = 500,
        test_sequences: int = 1000,
    ) -> None:
        super().__init__(length, vocab_size, validation_sequences, test_sequences)
        self.kind = kind

    def groups(self) -> list[tuple[str, int]]:
        return [("s", self.vocab_size)]

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size}

    def require_room(self, length: int) -> None:
        if length < 4:
            raise UserError(f"data=induction needs 4 tokens or more, but model.context={length}; type model.context=64")
        least = max(3, length // 2 if self.kind == "repeat" else 3)
        if self.vocab_size < least:
            raise UserError(
                f"data.vocab_size={self.vocab_size} has too few symbols for {length} tokens; type "
                f"data.vocab_size={least} or more"
            )

    def words(self, length: int) -> int:
        return length + 1

    def make(self, words: np.ndarray, length: int) -> Sequences:
        found = Sequences.empty(len(words), length)
        if self.kind == "repeat":
            half = length // 2  # an odd length ends with symbol 0
            symbols = distinct(words[:, : 2 * half], self.vocab_size)
            found.x[:, :half] = found.x[:, half : 2 * half] = symbols
            found.y[:, half : 2 * half - 1] = symbols[:, 1:]
            found.gaps[:, half : 2 * half - 1] = half - 1
            found.pairs[:] = half
            return found
        rows = np.arange(len(words))
        asked = below(words[:, 0], self.vocab_size)  # (B,) the symbol
        place = below(words[:, 1], length - 2)  # (B,) where it stands first
        others = below(words[:, 2 : length + 1], self.vocab_size - 1)  # (B, T - 1)
        found.x[:, :-1] = others + (others >= asked[:, None])  # any symbol but the one
        found.x[rows, place] = found.x[:, -1] = asked
        found.y[:, -1] = found.x[rows, place + 1]
        found.gaps[:, -1] = length - 2 - place
        found.pairs[:] = 1
        return found


class Copy(Task):
    """n_symbols are to be copied; None: half the length, which leaves no blank. They may be equal to one another."""

    name = "copy"

    def __init__(
        self,
        kind: Literal["plain", "selective"] = "plain",
        n_symbols: int | None = None,
        length: int | None = None,
        vocab_size: int = 32,
        validation_sequences: int = 500,
        test_sequences: int = 1000,
    ) -> None:
        super().__init__(length, vocab_size, validation_sequences, test_sequences)
        if n_symbols is not None and n_symbols < 1:
            raise UserError(f"data.n_symbols={n_symbols}: data.n_symbols must be at least 1, or null")
        if kind == "selective" and n_symbols is None:
            raise UserError("data.kind=selective copies symbols out of blanks; type data.n_symbols=16")
        self.kind, self.n_symbols = kind, n_symbols

    def groups(self) -> list[tuple[str, int]]:
        return [("_", 1), ("|", 1), ("s", self.vocab_size - 2)]

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "n_symbols": self.n_symbols, "vocab_size": self.vocab_size}

    def require_room(self, length: int) -> None:
        if length < 2 * (self.n_symbols or 1):
            raise UserError(
                f"data=copy of {self.n_symbols or 1} symbols takes {2 * (self.n_symbols or 1)} tokens, but "
                f"model.context={length}; type model.context={2 * (self.n_symbols or 1)}"
            )
        if self.vocab_size < 4:
            raise UserError(f"data.vocab_size={self.vocab_size} leaves nothing to copy; type data.vocab_size=4 or more")

    def words(self, length: int) -> int:
        return length

    def make(self, words: np.ndarray, length: int) -> Sequences:
        n = self.n_symbols or length // 2
        found = Sequences.empty(len(words), length)
        first = length - n  # tokens in front of the copy, that is of `|`
        symbols = 2 + below(words[:, :n], self.vocab_size - 2)  # (B, n)
        if self.kind == "plain":
            places = np.tile(np.arange(n), (len(words), 1))
        else:
            places = places_in_order(words[:, n:length], n)  # (B, n) of the first `first`
        np.put_along_axis(found.x, places, symbols, 1)
        found.x[:, first] = BEGIN
        found.x[:, first + 1 :] = symbols[:, :-1]
        found.y[:, first:] = symbols
        found.gaps[:, first:] = np.arange(first, length) - places
        found.pairs[:] = n
        return found
