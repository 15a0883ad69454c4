"""One token per UTF-8 byte: vocabulary 256, nothing to learn, nothing unseen."""

import codecs
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from softattn_lm.tokenizer.base import Tokenizer, utf8


class ByteStream:
    """Bytes in, whole characters out; a byte that can belong to no character becomes U+FFFD at once."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces  # the bytes of each id
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.pieces[token])

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    kind = "byte"
    vocab_size = 256

    def recipe(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def fit(self, texts: Iterable[str]) -> None:
        """Nothing to learn."""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        return ByteStream([bytes([value]) for value in range(256)])

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        return cls()
