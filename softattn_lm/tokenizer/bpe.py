"""Byte-level byte pair encoding, trained on the training split with `tokenizers`.

Sennrich et al. 2016, arXiv:1508.07909; over bytes and with the word pattern of GPT-2, Radford et al. 2019. The alphabet
is all 256 bytes, so no text is unknown; there are no special tokens, so a literal "<|endoftext|>" stays text.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from softattn_lm.errors import UserError
from softattn_lm.tokenizer.base import Tokenizer, utf8
from softattn_lm.tokenizer.byte import ByteStream

# GPT-2's pattern splits text into words, and no word reaches from a visible character into white space: " ?" only
# opens one, "\s+" holds nothing else, and its look-ahead concerns white space alone. So a text may be cut before it.
SAFE_CUT = re.compile(r"(?<=\S)(?=[ \n])")
PIECE = 256  # characters searched at a time for a cut, from the end: nearly always the first time finds one


def byte_alphabet() -> dict[str, int]:
    """The printable character by which GPT-2's vocabulary writes each byte -> that byte (encoder.py, 2019).

    Visible Latin-1 characters stand for themselves, the other 68 bytes follow from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in visible]
    return {chr(v): v for v in visible} | {chr(256 + i): v for i, v in enumerate(others)}


def last_safe_cut(text: str) -> int:
    """The last position before a blank or a line break and after a visible character; 0 if there is none."""
    end = len(text)
    while end > 0:
        begin = max(0, end - PIECE)
        cuts = [match.start() for match in SAFE_CUT.finditer(text, begin, end)]
        if cuts:
            return cuts[-1]
        end = begin if begin == 0 else begin + 1
    return 0


class BPETokenizer(Tokenizer):
    """`vocab_size` counts the 256 bytes: 256 is no merge at all. Text too small for so many merges gives fewer."""

    kind = "bpe"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 256:
            raise UserError(
                f"tokenizer.vocab_size={vocab_size} is below 256: a byte-level vocabulary begins with all 256 bytes; "
                "use tokenizer.vocab_size=256 or more, or tokenizer=char"
            )
        self.vocab_size = vocab_size
        self.requested = vocab_size
        self.pieces: list[bytes] = []
        self.backend = tokenizers.Tokenizer(models.BPE())

    def _set(self, backend: tokenizers.Tokenizer) -> None:
        alphabet = byte_alphabet()
        self.backend = backend
        self.vocab_size = backend.get_vocab_size()
        words = sorted(backend.get_vocab().items(), key=lambda item: item[1])
        if [number for _, number in words] != list(range(len(words))):
            raise ValueError("its ids are not 0 to the size of the vocabulary")
        self.pieces = [bytes(alphabet[char] for char in word) for word, _ in words]

    def recipe(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.requested}

    def fit(self, texts: Iterable[str]) -> None:
        """Warns if the text runs out of pairs that occur twice before `vocab_size` is reached."""
        allow_forks_afterwards()
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.requested,
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        self._set(backend)
        if self.vocab_size < self.requested:
            warnings.warn(
                f"tokenizer.vocab_size={self.requested} was not reached: the training text has no more pairs that "
                f"occur twice, so the vocabulary is {self.vocab_size}",
                stacklevel=2,
            )

    def encode(self, text: str) -> np.ndarray:
        [ids] = self.encode_batch([text], Counter())
        return ids

    def encode_batch(self, texts: list[str], unseen: Counter[str]) -> list[np.ndarray]:
        allow_forks_afterwards()
        for text in texts:
            utf8(text)
        return [np.array(e.ids, dtype=np.int32) for e in self.backend.encode_batch_fast(texts)]

    def cut(self, text: str) -> int:
        return last_safe_cut(text)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        return ByteStream(self.pieces)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size, "json": self.backend.to_str()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        tokenizer = cls(state["vocab_size"])
        # From bytes, as a faulty text would raise a bare Exception.
        tokenizer._set(tokenizers.Tokenizer.from_buffer(state["json"].encode()))
        if not byte_alphabet().keys() <= tokenizer.backend.get_vocab().keys():
            raise ValueError("it lacks some of the 256 bytes")
        return tokenizer


def allow_forks_afterwards() -> None:
    """Say that the threads of `tokenizers` are wanted; unsaid, it prints a warning from every data loader worker."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
