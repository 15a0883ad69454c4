"""Token files: per split one flat memory-mapped array of ids, beside a meta.json that says what they are.

    <cache>/<key>/meta.json                 format, source, fingerprint, dtype, splits, tokenizer state
                  train.bin                 uint16 (vocabulary up to 65,536) or uint32, nothing else
                  train.documents.npy       int64, token offsets at which documents begin

A folder appears under its final name only when it is complete and on disk (`publish`): what has the name is whole.
"""

import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from softattn_lm.errors import writing
from softattn_lm.tokenizer import Tokenizer, from_state

FORMAT = 1
LOOKED_AT = 1 << 27  # tokens, 256 MiB
STALE = 24 * 3600  # seconds after which an unfinished folder belongs to nobody


@dataclass
class Split:
    """The tokens of one split. Pickles as its path, so that loader processes map the file instead of copying it."""

    name: str
    path: Path
    dtype: str
    n_tokens: int
    n_bytes: int  # UTF-8 bytes of its text
    n_characters: int
    _tokens: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> np.ndarray:
        """(n_tokens,) uint16 or uint32, read only."""
        if self._tokens is None:
            # An empty file cannot be mapped.
            empty = np.empty(0, dtype=self.dtype)
            self._tokens = np.memmap(self.path, dtype=self.dtype, mode="r") if self.n_tokens else empty
        return self._tokens

    @property
    def documents(self) -> np.ndarray:
        """(n_documents,) int64: token offsets at which documents begin. A split may begin inside a document."""
        return np.load(self.path.with_name(f"{self.name}.documents.npy"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}


@dataclass
class Prepared:
    """Everything training needs to know about its data. A task has splits of its own kind, see data/tasks/base.py."""

    folder: Path | None  # None: nothing is stored
    tokenizer: Tokenizer
    fingerprint: str  # of text, tokenizer recipe and split: equal fingerprints are equal tokens
    source: str
    splits: dict[str, Split]
    cached: bool = False  # True if it was there already


def token_dtype(vocab_size: int) -> str:
    """The smallest of the two types that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def open_folder(folder: Path) -> Prepared | None:
    """What `folder` holds; None if it is not there. A damaged one (a disk that lost blocks) is moved away and named."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        dtype = meta["dtype"]
        splits = {name: Split(name, folder / f"{name}.bin", dtype, **sizes) for name, sizes in meta["splits"].items()}
        width = np.dtype(dtype).itemsize
        tokenizer = from_state(meta["tokenizer"])
        whole = all(
            split.path.stat().st_size == split.n_tokens * width and _is_whole(split, tokenizer.vocab_size)
            for split in splits.values()
        )
        if whole:
            return Prepared(folder, tokenizer, meta["fingerprint"], meta["source"], splits, True)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass  # unreadable or incomplete is damaged as well
    away = folder.with_name(f".damaged-{folder.name}-{secrets.token_hex(4)}")
    try:
        folder.rename(away)
    except FileNotFoundError:
        return None  # another process moved it first
    warnings.warn(f"{folder} is damaged and was moved to {away.name}; the text is prepared again", stacklevel=2)
    return None


def _is_whole(split: Split, vocab_size: int) -> bool:
    """Whether documents begin in order and inside of the text, and every id is one of the vocabulary's. The ids of a
    large file are not looked at: that would read it once more at every start."""
    documents = split.documents
    if documents.dtype != np.int64 or documents.ndim != 1:
        return False
    if documents.size and (documents[0] < 0 or documents[-1] > split.n_tokens or np.any(np.diff(documents) < 0)):
        return False
    return not 0 < split.n_tokens <= LOOKED_AT or int(split.tokens.max()) < vocab_size


@contextmanager
def unfinished_folder(cache: Path) -> Iterator[Path]:
    """A fresh hidden folder inside `cache`, removed afterwards unless it was published."""
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(".unfinished-*"):
        if time.time() - old.stat().st_mtime > STALE:
            shutil.rmtree(old, ignore_errors=True)
    folder = cache / f".unfinished-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        with writing(cache):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Flush everything to disk and give the folder its name. If another process was first, its equal folder stays."""
    for file in folder.iterdir():
        flush(file)
    flush(folder)
    try:
        folder.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    flush(final.parent)


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    # A name of a file need not be valid Unicode; escaped, it comes back as it was.
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
