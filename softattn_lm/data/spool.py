"""The text of one preparation as one UTF-8 file, so that no step needs it in memory.

A source can be read only once (a stream from the hub), yet the split needs the length, the tokenizer the training part,
and the token files everything. Positions are bytes in the spool; `documents` are the positions where documents begin.
"""

import codecs
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import pairwise
from pathlib import Path

import numpy as np

from softattn_lm.data.progress import Progress

BLOCK = 1 << 20  # bytes

Span = tuple[int, int]  # bytes begin <= i < end of the spool


class Spool:
    """Writes `pieces` to `path`, `joiner` between documents. Empty documents are kept as empty spans."""

    def __init__(self, path: Path, pieces: Iterable[tuple[str, bool]], joiner: str, progress: Progress) -> None:
        self.path = path
        self.joiner = joiner.encode("utf-8")
        starts, hashes = array("q"), array("Q")
        text = hashlib.sha256(self.joiner)
        document = hashlib.sha256()
        position = characters = 0
        with path.open("wb") as file, progress.task("reading text", None) as task:
            for piece, begins in pieces:
                data = piece.encode("utf-8")
                if begins:
                    if starts:
                        hashes.append(int.from_bytes(document.digest()[:8], "big"))
                        document = hashlib.sha256()
                        file.write(self.joiner)
                        position += len(self.joiner)
                        characters += len(joiner)
                    starts.append(position)
                    text.update(f"\0{position}\0".encode())
                file.write(data)
                document.update(data)
                text.update(data)
                position += len(data)
                characters += len(piece)
                task.advance(len(data))
        if starts:
            hashes.append(int.from_bytes(document.digest()[:8], "big"))
        self.n_bytes = position
        self.n_characters = characters
        self.documents = np.frombuffer(starts, dtype=np.int64)  # (n_documents,) bytes
        self.hashes = np.frombuffer(hashes, dtype=np.uint64)  # (n_documents,)
        self.digest = text.hexdigest()

    def position_of(self, character: int) -> int:
        """The byte at which the given character (counted from 0) begins; n_bytes for n_characters."""
        if character >= self.n_characters:
            return self.n_bytes
        position = seen = 0
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                # Every byte that is not a continuation 10xxxxxx begins a character.
                begins = (np.frombuffer(block, dtype=np.uint8) & 0xC0) != 0x80
                here = int(np.count_nonzero(begins))
                if seen + here > character:
                    return position + int(np.flatnonzero(begins)[character - seen])
                seen += here
                position += len(block)
        raise AssertionError("a character beyond the end of the spool")

    def pieces(self, spans: list[Span]) -> Iterator[tuple[str, bool]]:
        """The text of the spans in pieces of at most 1 MiB; the flag is True where a document begins."""
        with self.path.open("rb") as file:
            for begin, end in spans:
                first, last = np.searchsorted(self.documents, [begin, end])
                cuts = [*map(int, self.documents[first:last]), end]
                if cuts[0] > begin:
                    yield from self._read(file, begin, cuts[0], False)
                for start, stop in pairwise(cuts):
                    yield from self._read(file, start, stop, True)

    @staticmethod
    def _read(file: BufferedReader, begin: int, end: int, starts: bool) -> Iterator[tuple[str, bool]]:
        file.seek(begin)
        decoder = codecs.getincrementaldecoder("utf-8")()
        while begin < end:
            block = file.read(min(BLOCK, end - begin))
            assert block, "the spool is shorter than it was"
            begin += len(block)
            yield decoder.decode(block), starts
            starts = False
