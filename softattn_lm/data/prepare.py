"""Text -> token files, once per content: read, split, fit the tokenizer on train, encode.

The key of the cache is a digest of the text, the tokenizer's recipe and the split; no path, no time stamp. Nothing
holds the text in memory: it goes through a spool on disk and is encoded in pieces cut where the tokenizer allows it, so
that the ids are those of encoding each document whole.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from softattn_lm.data.progress import Progress
from softattn_lm.data.sources import Piece, Source, TextFiles
from softattn_lm.data.splitting import split
from softattn_lm.data.spool import Span, Spool
from softattn_lm.data.token_files import (
    FORMAT,
    Prepared,
    Split,
    open_folder,
    publish,
    token_dtype,
    unfinished_folder,
    write_meta,
)
from softattn_lm.errors import UserError
from softattn_lm.tokenizer import Tokenizer

PIECE = 1 << 14  # characters given to the tokenizer at once, if it allows a cut
BATCH = 1 << 20  # characters per encode_batch


def prepare(data: Source, tokenizer: dict[str, Any] | Tokenizer, cache: Path, progress: bool = True) -> Prepared:
    """The token files of `data`, made now or found in `cache`; `tokenizer` is its config node, or one to be fitted.

    The extra `validation_sets` are files of their own: they change neither the fingerprint nor the other splits.
    Raises UserError for text that cannot be read, split or encoded.
    """
    if isinstance(tokenizer, dict):
        from softattn_lm.config.build import build

        built = build(tokenizer)
        assert isinstance(built, Tokenizer)
        tokenizer = built
    bar = Progress(progress)
    found = prepare_splits(data, tokenizer, cache, bar)
    for name, path in data.validation_sets.items():
        files = TextFiles(path, separator=data.separator, setting=f"data.validation_sets.{name}")
        found.splits[name] = prepare_text(files, found.tokenizer, cache, name, progress)
    return found


def prepared_for(cfg: dict[str, Any], cache: Path) -> Prepared:
    """What the settings of a run train on: its text, prepared, or the streams of its task."""
    from softattn_lm.config.build import build
    from softattn_lm.data.tasks import Task

    data = build(cfg["data"])
    if not isinstance(data, Task):
        return prepare(data, cfg["tokenizer"], cache)
    if not cfg["tokenizer"]["_target_"].endswith(".SymbolTokenizer"):
        raise UserError(f"data={data.name} brings its own symbols and has no text to cut; type tokenizer=symbols")
    return data.prepared(cfg["model"]["context"])


def prepare_splits(data: Source, tokenizer: Tokenizer, cache: Path, bar: Progress) -> Prepared:
    """Train, validation and test of `data`."""
    settings = {
        "format": FORMAT,
        "tokenizer": tokenizer.recipe(),
        "split": [data.split, str(data.val_fraction), str(data.test_fraction)],
    }
    identity = data.identity()
    if identity is not None and (known := open_folder(cache / key(settings, identity))):
        return known
    with unfinished_folder(cache) as folder:
        spools = read_parts(data, folder, bar)
        if identity is None:
            identity = " ".join(f"{name} {spool.digest}" for name, spool in spools.items())
            if known := open_folder(cache / key(settings, identity)):
                return known
        elif data.identity() != identity:
            raise UserError(f"{data.describe()} changed while it was read; start again")
        spans = split(spools["text"], data.split, data.val_fraction, data.test_fraction)
        texts = {name: (spools["text"], found) for name, found in spans.items()}
        texts |= {name: (spool, [(0, spool.n_bytes)]) for name, spool in spools.items() if name != "text"}
        fit(tokenizer, *texts["train"], bar)
        return write(folder, cache / key(settings, identity), texts, tokenizer, data.describe(), bar)


def prepare_text(
    data: TextFiles, tokenizer: Tokenizer, cache: Path, name: str = "text", progress: bool = True
) -> Split:
    """The whole of `data`, encoded with a fitted tokenizer, as the one split `name`; cached like everything."""
    state = hashlib.sha256(json.dumps(tokenizer.state(), sort_keys=True).encode()).hexdigest()
    final = cache / key({"format": FORMAT, "tokenizer": state, "split": name}, data.identity())
    if known := open_folder(final):
        return known.splits[name]
    bar = Progress(progress)
    with unfinished_folder(cache) as folder:
        spool = read_parts(data, folder, bar)["text"]
        texts = {name: (spool, [(0, spool.n_bytes)])}
        return write(folder, final, texts, tokenizer, data.describe(), bar).splits[name]


def key(settings: dict[str, Any], content: str) -> str:
    """The name of a cache folder: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()[:32]


def read_parts(data: Source, folder: Path, bar: Progress) -> dict[str, Spool]:
    """The text of each part of the source. Raises UserError if one is empty."""
    spools = {}
    for name, pieces in data.parts().items():
        spools[name] = Spool(folder / f"{name}.spool", pieces, data.joiner, bar)
        between = len(data.joiner) * max(0, len(spools[name].documents) - 1)
        if spools[name].n_characters == between:
            part = "" if name == "text" else f" for {name}"
            raise UserError(f"{data.describe()} holds no text{part}: every file or row is empty")
    return spools


def fit(tokenizer: Tokenizer, spool: Spool, spans: list[Span], bar: Progress) -> None:
    """On the training text only: validation and test must be as unseen for the tokenizer as for the model."""
    with bar.task("learning the vocabulary", sum(end - begin for begin, end in spans)) as task:

        def texts() -> Iterator[str]:
            for text, _ in pieces(spool.pieces(spans), tokenizer.cut):
                yield text
                task.advance(len(text))

        tokenizer.fit(texts())


def pieces(documents: Iterable[Piece], cut: Callable[[str], int]) -> Iterator[Piece]:
    """The same text in pieces of about `PIECE` characters, cut where documents begin and where `cut` allows it."""
    held, begins, size = "", False, PIECE
    for text, starts in documents:
        if starts:
            if held:
                yield held, begins
            held, begins, size = "", True, PIECE
        held += text
        while len(held) > size:
            at = cut(held[:size])
            if at == 0:
                size *= 2  # no cut in there: look at more of the text
                continue
            yield held[:at], begins
            held, begins, size = held[at:], False, PIECE
    if held:
        yield held, begins


def batches(cut_pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of about `BATCH` characters, which `tokenizers` encodes on all cores."""
    group: list[Piece] = []
    size = 0
    for piece in cut_pieces:
        group.append(piece)
        size += len(piece[0])
        if size >= BATCH:
            yield group
            group, size = [], 0
    if group:
        yield group


def write(
    folder: Path,
    final: Path,
    texts: dict[str, tuple[Spool, list[Span]]],
    tokenizer: Tokenizer,
    source: str,
    bar: Progress,
) -> Prepared:
    """Encode each text, describe it, and publish the folder under its final name."""
    splits = {name: encode(folder, name, *text, tokenizer, source, bar) for name, text in texts.items()}
    sizes = {
        name: {"n_tokens": split.n_tokens, "n_bytes": split.n_bytes, "n_characters": split.n_characters}
        for name, split in splits.items()
    }
    meta = {
        "format": FORMAT, "source": source, "fingerprint": final.name,
        "dtype": token_dtype(tokenizer.vocab_size), "splits": sizes, "tokenizer": tokenizer.state(),
    }  # fmt: skip
    write_meta(folder, meta)
    for spool, _ in texts.values():
        spool.path.unlink(missing_ok=True)
    publish(folder, final)
    moved = {name: replace(split, path=final / split.path.name) for name, split in splits.items()}
    return Prepared(final, tokenizer, final.name, source, moved)


def encode(
    folder: Path, name: str, spool: Spool, spans: list[Span], tokenizer: Tokenizer, source: str, bar: Progress
) -> Split:
    """Write `name`.bin and its document offsets."""
    dtype = token_dtype(tokenizer.vocab_size)
    documents = array("q")
    unseen: Counter[str] = Counter()
    n_tokens = n_bytes = n_characters = 0
    path = folder / f"{name}.bin"
    with path.open("wb") as file, bar.task(f"encoding {name}", sum(end - begin for begin, end in spans)) as task:
        for group in batches(pieces(spool.pieces(spans), tokenizer.cut)):
            before = n_bytes
            ids = tokenizer.encode_batch([text for text, _ in group], unseen)
            for (text, starts), tokens in zip(group, ids, strict=True):
                if starts:
                    documents.append(n_tokens)
                file.write(tokens.astype(dtype).tobytes())
                n_tokens += len(tokens)
                n_characters += len(text)
                n_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
            task.advance(n_bytes - before)
    tokenizer.report(unseen, f"the {name} text of {source}")
    # numpy's own write to a file tells how many bytes a full disk took, and not that it is full.
    offsets = BytesIO()
    np.save(offsets, np.frombuffer(documents, dtype=np.int64))
    (folder / f"{name}.documents.npy").write_bytes(offsets.getbuffer())
    return Split(name, path, dtype, n_tokens, n_bytes, n_characters)
