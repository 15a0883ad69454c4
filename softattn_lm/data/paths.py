"""data.path -> files: one file, a folder or a glob; whatever exists literally wins over its meaning as a pattern."""

import difflib
import glob
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from softattn_lm.data.reading import ROW_SUFFIXES, TEXT_SUFFIXES, holds_rows
from softattn_lm.errors import UserError


def as_typed(path: str) -> Path:
    """What exists literally wins over ~ as a home folder, and a ~name that is nobody's stays as it is."""
    return Path(path if os.path.exists(path) else os.path.expanduser(path))


def find_files(path: str, setting: str = "data.path") -> list[Path]:
    """The files in the order of their names. Raises UserError if there is none, or texts and rows are mixed.

    A folder gives the txt, jsonl, parquet and gz files anywhere below it; a name or a glob may have any ending.
    """
    try:
        literal = as_typed(path)
        if literal.is_dir():
            files = in_folder(literal, setting)
        elif literal.exists():
            if not literal.is_file():
                raise UserError(f"{setting}={path} is neither a file nor a folder, and is read more than once; save it")
            return [literal]
        else:
            files = sorted({found for found in map(Path, expanded(str(literal))) if found.is_file()})
    except OSError as error:
        raise UserError(f"{setting}={path} cannot be read: {error.strerror or error}") from None
    if not files and literal.is_symlink():
        raise UserError(f"{setting}={path} is a link to {os.readlink(literal)}, where there is nothing")
    if not files:
        raise UserError(f"{setting}={path}: no such file or folder{nearest(literal)}")
    rows = [file for file in files if holds_rows(file)]
    if rows and len(rows) < len(files):
        text = next(file for file in files if not holds_rows(file))
        raise UserError(
            f"{setting}={path} mixes rows ({rows[0].name}) with plain text ({text.name}); name one kind, such as "
            f"{setting}='{text.parent}/*{text.suffix}'"
        )
    return files


def expanded(pattern: str) -> Iterator[str]:
    """What a glob finds. `**` goes into folders that are not hidden, and into no link to one: it may lead back."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    for root in glob.glob(os.path.join(*parts[:at])) if at else ["."]:
        for folder, inside, files in os.walk(root):
            inside[:] = [name for name in inside if not name.startswith(".")]
            if at + 1 < len(parts):
                yield from expanded(os.path.join(glob.escape(folder), *parts[at + 1 :]))
            else:
                yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def in_folder(folder: Path, setting: str) -> list[Path]:
    """Files below `folder` with a known ending, hidden ones aside; says which it leaves out."""
    every = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    known = [file for file in every if file.name.lower().endswith(ROW_SUFFIXES + TEXT_SUFFIXES)]
    others = Counter(file.suffix or "no ending" for file in every if file not in set(known))
    if others and known:
        endings = ", ".join(f"{n} {ending}" for ending, n in sorted(others.items()))
        warnings.warn(f"{setting}={folder}: left out {endings}; name them with a glob to use them", stacklevel=3)
    if not known:
        raise UserError(
            f"{setting}={folder} holds no txt, jsonl, parquet or gz file"
            + (f"; name other endings with a glob: {setting}='{folder}/*{every[0].suffix}'" if every else "")
        )
    return known


def nearest(path: Path) -> str:
    """'; did you mean ...?' if a name like it stands in the same folder."""
    if not path.parent.is_dir():
        return f" (nor is there a folder {path.parent})"
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
