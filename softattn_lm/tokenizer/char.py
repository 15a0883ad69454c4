"""One token per character (Unicode code point) of the training text, in code point order."""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, Self

import numpy as np

from softattn_lm.errors import UserError
from softattn_lm.tokenizer.base import Tokenizer, UnseenCharacters, utf8

N_CODE_POINTS = 0x110000
REPLACEMENT = "\ufffd"  # what the unknown symbol decodes to


def code_points(text: str) -> np.ndarray:
    """(len(text),) uint32."""
    utf8(text)  # refuses half surrogate pairs, in the words of all tokenizers
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def listed(unseen: Counter[str], most: int = 12) -> str:
    """'é' U+00E9 (3 times), '\\n' U+000A (once), ... the most frequent first."""
    ordered = sorted(unseen.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{char!r} U+{ord(char):04X} ({'once' if n == 1 else f'{n} times'})" for char, n in ordered[:most]]
    return ", ".join(words) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


class CharStream:
    """Every id is a whole character, so nothing is ever held back."""

    def __init__(self, symbols: list[str]) -> None:
        self.symbols = symbols

    def push(self, token: int) -> str:
        return self.symbols[token]

    def flush(self) -> str:
        return ""


class CharTokenizer(Tokenizer):
    """Ids count the distinct characters of the training split in code point order.

    unknown="error" refuses a character that was not there; unknown="symbol" adds one more id, the last, which stands
    for all of them, decodes to U+FFFD and warns with a count.
    """

    kind = "char"

    def __init__(self, unknown: Literal["error", "symbol"] = "error") -> None:
        if unknown not in ("error", "symbol"):
            raise UserError(f"tokenizer.unknown={unknown} is not known; use tokenizer.unknown=error or symbol")
        self.unknown = unknown
        self._set("")

    def _set(self, characters: str) -> None:
        self.symbols = list(characters) + ([REPLACEMENT] if self.unknown == "symbol" else [])
        self.characters = characters
        self.vocab_size = len(self.symbols)
        known = code_points(characters)
        # One entry per code point up to the largest known one, and a last one for everything beyond.
        self.table = np.full(int(known.max(initial=0)) + 2, -1, dtype=np.int32)
        self.table[known] = np.arange(len(known), dtype=np.int32)

    def recipe(self) -> dict[str, Any]:
        return {"kind": self.kind, "unknown": self.unknown}

    def fit(self, texts: Iterable[str]) -> None:
        seen = np.zeros(N_CODE_POINTS, dtype=bool)
        for text in texts:
            seen[code_points(text)] = True
        if not seen.any():
            raise UserError("tokenizer=char found no character to learn: the training text is empty")
        self._set(np.flatnonzero(seen).astype("<u4").tobytes().decode("utf-32-le"))

    def encode(self, text: str) -> np.ndarray:
        unseen: Counter[str] = Counter()
        [ids] = self.encode_batch([text], unseen)
        self.report(unseen, "the text")
        return ids

    def encode_batch(self, texts: list[str], unseen: Counter[str]) -> list[np.ndarray]:
        batch = []
        for text in texts:
            codes = code_points(text)
            ids = self.table[np.minimum(codes, len(self.table) - 1)]
            missing = ids < 0
            if missing.any():
                unseen.update(codes[missing].tobytes().decode("utf-32-le"))
                ids[missing] = len(self.characters)
            batch.append(ids)
        return batch

    def report(self, unseen: Counter[str], where: str) -> None:
        """Raises UserError (unknown="error") or warns (unknown="symbol") if anything was counted."""
        if not unseen:
            return
        found = f"{where} has characters which the training text of this tokenizer has not: {listed(unseen)}"
        if self.unknown == "error":
            raise UserError(
                f"{found}; leave them out, or train with tokenizer=byte or tokenizer=bpe (which know every character) "
                "or tokenizer.unknown=symbol"
            )
        total = unseen.total()
        warnings.warn(
            f"{found}; {total} of its characters {'was' if total == 1 else 'were'} replaced by the unknown symbol",
            UnseenCharacters,
            stacklevel=3,
        )

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.symbols[i] for i in ids)

    def stream(self) -> CharStream:
        return CharStream(self.symbols)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "unknown": self.unknown, "characters": self.characters}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        tokenizer = cls(state["unknown"])
        characters = state["characters"]
        if not isinstance(characters, str) or sorted(set(characters)) != list(characters):
            raise ValueError("its characters are not in code point order, each once")
        tokenizer._set(characters)
        return tokenizer
