"""Room 4, text <-> token ids: characters, bytes, a byte-level BPE trained here, or a ready-made tokenizer.json.

The symbols of a task have names as well (symbols.py), and no text.

Every tokenizer gives text back exactly, is a pure function of the text it was fitted on, and travels as a plain dict.
"""

from typing import Any

from softattn_lm.errors import UserError
from softattn_lm.tokenizer.base import TextStream, Tokenizer, UnseenCharacters
from softattn_lm.tokenizer.bpe import BPETokenizer
from softattn_lm.tokenizer.byte import ByteTokenizer
from softattn_lm.tokenizer.char import CharTokenizer
from softattn_lm.tokenizer.pretrained import PretrainedTokenizer
from softattn_lm.tokenizer.symbols import SymbolTokenizer

KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (CharTokenizer, ByteTokenizer, BPETokenizer, PretrainedTokenizer, SymbolTokenizer)
}


def from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `state()` this is. Raises UserError for a kind this version does not know, or no state."""
    kind = state.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"a saved tokenizer of kind {kind!r:.80}, but this version knows {', '.join(KINDS)}")
    try:
        return KINDS[kind].from_state(state)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"a saved tokenizer of kind {kind!r} is damaged: {first:.200}") from None


__all__ = [
    "BPETokenizer", "ByteTokenizer", "CharTokenizer", "PretrainedTokenizer", "SymbolTokenizer", "TextStream",
    "Tokenizer", "UnseenCharacters", "from_state",
]  # fmt: skip
