"""A ready-made tokenizer: a `tokenizer.json` on disk, or a name on the Hugging Face hub.

Only a hub name contacts the network. Special tokens are never added, and a literal one in the text stays text.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import decoders

from softattn_lm.errors import UserError
from softattn_lm.tokenizer.base import Tokenizer, utf8
from softattn_lm.tokenizer.bpe import allow_forks_afterwards, last_safe_cut

PROBE = " Emma  wasn't\n\n\tnaïve; 日本 \U0001f389 <|endoftext|>\r\nItaLIC "

NEAR = 256  # characters
TRIALS = 32


def read(path: str) -> tokenizers.Tokenizer:
    """From a file, a folder with a tokenizer.json, or the hub. Raises UserError naming the file or the hub name."""
    if not path:
        raise UserError("tokenizer=pretrained needs tokenizer.path=<a tokenizer.json, its folder, or a hub name>")
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except OSError as error:
            raise UserError(f"tokenizer.path={path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"tokenizer.path={path} is not a tokenizer.json of `tokenizers`: {error}") from None
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(".json"):
        raise UserError(f"tokenizer.path={path}: no such file; give a tokenizer.json, its folder, or a hub name")
    return download(path)


def download(name: str) -> tokenizers.Tokenizer:
    """`tokenizer.json` of a hub repository, through the hub's own cache."""
    from huggingface_hub import hf_hub_download

    try:
        return tokenizers.Tokenizer.from_buffer(Path(hf_hub_download(name, "tokenizer.json")).read_bytes())
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors; a bad name or file is a ValueError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"tokenizer.path={name} is no local file, and the hub does not give it: {reason}") from None


class _Refusals:
    """`tokenizers` raises a bare Exception where it cannot go on; that, and no class derived from it, is told."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise UserError(f"this tokenizer cannot handle the text: {str(error)[:200]}; use another one") from None


class PretrainedStream:
    """Wraps `DecodeStream`, which holds back incomplete characters but has no end: `flush` decodes what it held."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.decoder = decoders.DecodeStream(skip_special_tokens=False)
        self.ids: list[int] = []
        self.emitted = 0  # characters

    def push(self, token: int) -> str:
        self.ids.append(int(token))
        with _Refusals():
            text = self.decoder.step(self.backend, int(token)) or ""
        self.emitted += len(text)
        return text

    def flush(self) -> str:
        return self.backend.decode(self.ids, skip_special_tokens=False)[self.emitted :]


class PretrainedTokenizer(Tokenizer):
    """`path`: a tokenizer.json, a folder holding one, or a hub name. Warns if the tokenizer changes text.

    Long documents are cut where a trial shows that the ids stay the same, else given to it whole.
    """

    kind = "pretrained"

    def __init__(self, path: str) -> None:
        self._set(read(path))
        back = self.decode(self.encode(PROBE))
        if back != PROBE:
            warnings.warn(
                f"tokenizer.path={path} does not give text back as it was ({PROBE!r} became {back!r}), so bits per "
                "byte are not comparable with those of other tokenizers",
                stacklevel=2,
            )

    def _set(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self.backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def recipe(self) -> dict[str, Any]:
        return {"kind": self.kind, "sha256": hashlib.sha256(self.backend.to_str().encode()).hexdigest()}

    def fit(self, texts: Iterable[str]) -> None:
        """Nothing to learn."""

    def encode(self, text: str) -> np.ndarray:
        [ids] = self.encode_batch([text], Counter())
        return ids

    def encode_batch(self, texts: list[str], unseen: Counter[str]) -> list[np.ndarray]:
        allow_forks_afterwards()
        for text in texts:
            utf8(text)
        with _Refusals():
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def cut(self, text: str) -> int:
        """Tries the last places where GPT-2's pattern may be cut: ids depend on what is near, so the near decides."""
        end = len(text) - NEAR  # what follows a cut must be there to be judged
        for _ in range(TRIALS):
            at = last_safe_cut(text[: max(0, end)])
            if at <= 0:
                break
            left, right = text[max(0, at - NEAR) : at], text[at : at + NEAR]
            whole, first, second = self.encode_batch([left + right, left, right], Counter())
            if np.array_equal(whole, np.concatenate([first, second])):
                return at
            end = at
        return 0

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def stream(self) -> PretrainedStream:
        return PretrainedStream(self.backend)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "json": self.backend.to_str()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        tokenizer = cls.__new__(cls)
        tokenizer._set(tokenizers.Tokenizer.from_buffer(state["json"].encode()))
        return tokenizer
