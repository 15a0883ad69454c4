"""Files -> documents, without loss: text is read as bytes and decoded strictly, nothing is repaired.

txt, gz: CR, CRLF, NUL, U+2028 are kept; one byte order mark is dropped with a notice. Errors name file and byte offset
(jsonl: file and line; parquet: file and row). The text loader of `datasets` changes line ends, so it is not used.
"""

import codecs
import gzip
import json
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from softattn_lm.errors import UserError

BLOCK = 1 << 20  # bytes read at a time
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
TEXT_SUFFIXES = (".txt", ".txt.gz", ".gz")
OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip


def holds_rows(file: Path) -> bool:
    """True if each row is a document (jsonl, parquet); any other file is one document, whatever its name."""
    return file.name.lower().endswith(ROW_SUFFIXES)


def open_bytes(file: Path) -> BinaryIO | gzip.GzipFile:
    """The (unpacked) bytes of a file. Raises UserError if a packed file does not say so in its name."""
    if file.name.lower().endswith(".gz"):
        return gzip.open(file, "rb")
    stream = file.open("rb")
    if stream.read(2) == b"\x1f\x8b":
        stream.close()
        raise UserError(f"{file} is gzip data; rename it to {file.name}.gz")
    stream.seek(0)
    return stream


def refuse_unreadable(file: Path, error: OSError | EOFError | zlib.error) -> UserError:
    """The UserError for a file the system or gzip gives up on."""
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"{file} cannot be read: {reason}")


def read_text(file: Path) -> Iterator[str]:
    """The text of a txt or gz file in pieces of about 1 MiB."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # bytes before this block
    try:
        with open_bytes(file) as stream:
            while block := stream.read(BLOCK):
                if offset == 0:
                    refuse_other_encodings(file, block)
                    if block.startswith(codecs.BOM_UTF8):
                        warnings.warn(f"{file} begins with a byte order mark, which was left out", stacklevel=2)
                        block, offset = block[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
                held = len(decoder.getstate()[0])  # bytes of a character begun in the block before
                yield decode(decoder, block, file, offset - held)
                offset += len(block)
            yield decode(decoder, b"", file, offset - len(decoder.getstate()[0]), final=True)
    except (OSError, EOFError, zlib.error) as error:
        raise refuse_unreadable(file, error) from None


def refuse_other_encodings(file: Path, start: bytes) -> None:
    """Raises UserError if the file begins with the mark of UTF-16 or UTF-32."""
    for mark, name in OTHER_ENCODINGS.items():
        if start.startswith(mark):
            raise UserError(f"{file} is {name}, not UTF-8; convert it: iconv -f {name} -t UTF-8 {file.name} > utf8.txt")


def decode(decoder: codecs.IncrementalDecoder, block: bytes, file: Path, offset: int, final: bool = False) -> str:
    """Strict UTF-8; `offset` is the place in the file of the first byte the decoder will look at."""
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{file} is not UTF-8: byte 0x{byte:02x} at offset {offset + error.start} ({error.reason}); if it is "
            f"Latin-1, convert it: iconv -f LATIN1 -t UTF-8 {file.name} > utf8.txt"
        ) from None


def read_jsonl(file: Path, column: str) -> Iterator[str]:
    """One document per line: the string under `column` of the line's object. Empty lines are skipped."""
    try:
        with open_bytes(file) as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    refuse_other_encodings(file, line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield field(parse(line, f"{file} line {number}"), column, f"{file} line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise refuse_unreadable(file, error) from None


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte 0x{line[error.start]:02x} at position {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f'{where} is a JSON {type(row).__name__}, not an object such as {{"text": "..."}}')
    return row


def field(row: dict[str, Any], column: str, where: str) -> str:
    """The string under `column`. Raises UserError if it is missing, null, something else or not valid Unicode."""
    if column not in row:
        names = ", ".join(map(str, row)) or "none"
        raise UserError(f"{where} has no field '{column}' (its fields: {names}); use data.text_column=<one of them>")
    value = row[column]
    if not isinstance(value, str):
        what = "null" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{where}: field '{column}' is {what}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field '{column}' has half a surrogate pair at character {error.start}") from None
    return value


def read_parquet(file: Path, column: str) -> Iterator[str]:
    """One document per row, in batches, so that the file is never in memory as a whole."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise UserError(
                    f"{file} has no column '{column}' (its columns: {', '.join(names)}); use data.text_column=<one>"
                )
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                for value in values(batch.column(0), f"{file} row", number):
                    number += 1
                    yield field({column: value}, column, f"{file} row {number}")
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} is not a readable parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise refuse_unreadable(file, error) from None


def values(column: Any, where: str, before: int) -> list[Any]:
    """What a column of parquet holds; `before`: rows before it. Raises UserError for the first that is not UTF-8."""
    try:
        found: list[Any] = column.to_pylist()
        return found
    except UnicodeDecodeError:
        for number, value in enumerate(column, start=before + 1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise UserError(f"{where} {number}: byte 0x{byte:02x} at position {error.start} is not UTF-8") from None
        raise


def read_documents(file: Path, column: str) -> Iterator[tuple[str, bool]]:
    """Pieces of text; the flag is True where a document begins."""
    name = file.name.lower()
    if holds_rows(file):
        rows = read_parquet(file, column) if name.endswith(".parquet") else read_jsonl(file, column)
        for row in rows:
            yield row, True
        return
    starts = True
    for piece in read_text(file):
        if piece:
            yield piece, starts
            starts = False
