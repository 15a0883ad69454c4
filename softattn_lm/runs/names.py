"""What runs and their folder are called: on the command line, and on disk."""

from __future__ import annotations

import os
from pathlib import Path

from softattn_lm.errors import UserError

LONGEST_NAME = 200  # bytes of a run's name; file systems allow 255, and files beside it are called after it


def runs_folder(text: str | Path) -> Path:
    """The folder that runs=`text` means. One that is called so wins over ~ as a home, which a ~name without one is
    not."""
    return Path(text if os.path.exists(text) else os.path.expanduser(text))


def run_name(folder: Path, root: str | Path = "runs") -> str:
    """What a person types for this run where runs=`root`: its path below `root`, <sweep>/<job> for the job of a sweep;
    outside of it the whole path."""
    below, above = folder.resolve(), runs_folder(root).resolve()
    return below.relative_to(above).as_posix() if below.is_relative_to(above) else str(folder)


def valid_name(name: str, what: str = "name=") -> str:
    """A folder name that needs no quoting anywhere. `=` would read as an override on the command line. `what`: stands
    before it in an error.
    """
    bad = sorted({c for c in name if not (c.isalnum() or c in "._-")})
    if not bad and len(name.encode()) > LONGEST_NAME:
        raise UserError(f"{what}{name[:40]}... is {len(name.encode())} bytes long; type one of {LONGEST_NAME} or less")
    if not name or bad or name.startswith((".", "-")) or name == "cache":
        said = f"contains {' '.join(repr(c) for c in bad)}" if bad else "is empty, reserved or begins with . or -"
        raise UserError(
            f"{what}{name} {said}; use letters, digits, dots, dashes and underscores, such as {what}sdpa-seed0"
        )
    return name
