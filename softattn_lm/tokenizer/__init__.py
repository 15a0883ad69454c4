"""Room 4, text <-> token ids: characters, bytes, a byte-level BPE trained here, or a ready-made tokenizer.json.

Every tokenizer gives text back exactly, is a pure function of the text it was fitted on, and travels as a plain dict.
"""

from typing import Any

from softattn_lm.tokenizer.base import TextStream, Tokenizer, UnseenCharacters
from softattn_lm.tokenizer.bpe import BPETokenizer
from softattn_lm.tokenizer.byte import ByteTokenizer
from softattn_lm.tokenizer.char import CharTokenizer
from softattn_lm.tokenizer.pretrained import PretrainedTokenizer

KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (CharTokenizer, ByteTokenizer, BPETokenizer, PretrainedTokenizer)
}


def from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `state()` this is. Raises ValueError for a kind this version does not know."""
    kind = state.get("kind")
    if kind not in KINDS:
        raise ValueError(f"a saved tokenizer of kind {kind!r}, but this version knows {', '.join(KINDS)}")
    return KINDS[kind].from_state(state)


__all__ = [
    "BPETokenizer", "ByteTokenizer", "CharTokenizer", "PretrainedTokenizer", "TextStream", "Tokenizer",
    "UnseenCharacters", "from_state",
]  # fmt: skip
