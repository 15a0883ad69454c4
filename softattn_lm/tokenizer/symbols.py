"""The symbols of a task by name: k3 v17 _ k5, with spaces between them. A task brings its own; text has none."""

from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from softattn_lm.errors import UserError
from softattn_lm.tokenizer.base import Tokenizer

MOST = 1 << 24  # symbols; a damaged state must not ask for more memory than that


class SymbolStream:
    """Every id is a whole symbol; a space stands before each."""

    def __init__(self, symbols: list[str]) -> None:
        self.symbols = symbols

    def push(self, token: int) -> str:
        return f" {self.symbols[token]}"

    def flush(self) -> str:
        return ""


class SymbolTokenizer(Tokenizer):
    """groups: (prefix, how many) in the order of their ids; a group of one is its prefix alone, others count from 0.

    [("_", 1), ("k", 2), ("v", 2)]:   _ k0 k1 v0 v1 are 0 1 2 3 4
    """

    kind = "symbols"

    def __init__(self, groups: list[tuple[str, int]] | None = None) -> None:
        self.groups = list(groups or [])
        self.symbols = [
            prefix if count == 1 else f"{prefix}{number}" for prefix, count in self.groups for number in range(count)
        ]
        self.vocab_size = len(self.symbols)
        self.ids = {symbol: index for index, symbol in enumerate(self.symbols)}

    def recipe(self) -> dict[str, Any]:
        return self.state()

    def fit(self, texts: Iterable[str]) -> None:
        raise UserError(
            "tokenizer=symbols names what a task such as data=recall is made of, and this data is text; type "
            "tokenizer=char, byte or bpe"
        )

    def encode(self, text: str) -> np.ndarray:
        """Symbols with white space between them. Raises UserError for another word, and for none."""
        words = text.split()
        unknown = next((word for word in words if word not in self.ids), None)
        if unknown is not None or not words:
            said = "an empty text holds no symbol" if unknown is None else f"{unknown} is no symbol of this run's task"
            raise UserError(f"{said}; there are {self.listed()}, so type for example '{' '.join(self.symbols[-2:])}'")
        return np.array([self.ids[word] for word in words], dtype=np.int32)

    def listed(self) -> str:
        """_, k0 to k126 and so on."""
        return ", ".join(prefix if n == 1 else f"{prefix}0 to {prefix}{n - 1}" for prefix, n in self.groups)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.symbols[i] for i in ids)

    def stream(self) -> SymbolStream:
        return SymbolStream(self.symbols)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "groups": [[prefix, count] for prefix, count in self.groups]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        groups = [(prefix, count) for prefix, count in state["groups"]]
        if not all(isinstance(p, str) and type(n) is int and n > 0 for p, n in groups) or not groups:
            raise ValueError("its groups are no pairs of a prefix and a number")
        if sum(n for _, n in groups) > MOST:
            raise ValueError(f"it has more than {MOST} symbols")
        return cls(groups)
