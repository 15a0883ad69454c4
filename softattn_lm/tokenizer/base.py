"""What a tokenizer is: a reversible map between text and integers, with a plain state.

decode(encode(text)) == text            for every Unicode text
from_state(t.state())                   encodes and decodes like t
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from softattn_lm.errors import UserError


class UnseenCharacters(UserWarning):
    """Characters that the tokenizer was not fitted on were replaced by its unknown symbol."""


class TextStream(Protocol):
    """Turns ids into text one by one; what it has emitted never ends inside a character."""

    def push(self, token: int) -> str:
        """The text that became complete with this id, perhaps ''."""

    def flush(self) -> str:
        """What is left at the end: '' or, if the ids stopped inside a character, U+FFFD."""


class Tokenizer(ABC):
    """Ids are 0 .. vocab_size - 1. `fit` comes first, except after `from_state` and where there is nothing to fit."""

    kind: ClassVar[str]
    vocab_size: int

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """What, together with the text it is fitted on, decides every id: part of the key of the token cache."""

    @abstractmethod
    def fit(self, texts: Iterable[str]) -> None:
        """Learn the vocabulary from the training split, given in pieces (see `cut`). Same text, same vocabulary."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """(n_tokens,) int32. Raises UserError for what cannot be represented."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids. Bytes that are not UTF-8, which only a model can produce, become U+FFFD."""

    @abstractmethod
    def stream(self) -> TextStream:
        """A fresh stream for one sequence of ids."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """A plain dict (str, int, list, None) that JSON keeps, with "kind" in it."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The inverse of `state`."""

    def encode_batch(self, texts: list[str], unseen: Counter[str]) -> list[np.ndarray]:
        """One (n_tokens,) int32 per text. Unseen characters are counted here rather than reported one by one."""
        return [self.encode(text) for text in texts]

    def report(self, unseen: Counter[str], where: str) -> None:
        """Raise or warn about what `encode_batch` counted; `where` names the text. Most tokenizers know every text."""
        assert not unseen

    def cut(self, text: str) -> int:
        """The last position at which `text` may be cut so that encoding both halves equals encoding the whole.

        0 means: nowhere. Long texts are encoded in pieces cut here.
        """
        return len(text)


def utf8(text: str) -> bytes:
    """UTF-8 of `text`. Raises UserError for half a surrogate pair, which is no character."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text is not valid Unicode: {text[error.start]!r} at character {error.start} is half of a surrogate "
            "pair (was it read with the wrong encoding?); give it as UTF-8"
        ) from None
