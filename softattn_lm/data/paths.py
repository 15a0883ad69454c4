"""data.path -> files: one file, a folder or a glob; whatever exists literally wins over its meaning as a pattern."""

import difflib
import glob
import os
import warnings
from collections import Counter
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
            return [literal]
        else:
            files = sorted(Path(found) for found in glob.glob(str(literal), recursive=True) if Path(found).is_file())
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
