"""Small files in a run folder, written whole or not at all; and what is left or said where that failed."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from softattn_lm.errors import UserError, writing
from softattn_lm.runs.names import run_name

# The temporary names of `replace_text` and of checkpoints.
_LEFT_OVER = re.compile(r".+\.(json|jsonl|yaml|csv|txt|ckpt|npz)\.\d+\.tmp", re.DOTALL)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, sees the old one or the new one and never half of it."""
    waiting = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    waiting.unlink(missing_ok=True)
    try:
        with writing(path), waiting.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """A number that is not finite becomes null: JSON knows no other."""
    replace_text(path, json.dumps(finite_or_null(value), indent=1, allow_nan=False) + "\n")


def finite_or_null(value: Any) -> Any:
    """`value` with null for each number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remove_left_over(folder: Path) -> None:
    """Files that a process killed in the middle of a write left in a run folder, under names that nothing reads."""
    for place in (folder, folder / "checkpoints"):
        for waiting in place.glob("*.tmp"):
            if _LEFT_OVER.fullmatch(waiting.name) and waiting.is_file():  # and not a person's
                waiting.unlink(missing_ok=True)


def write_failed(error: OSError, folder: Path) -> UserError:
    """The line for a file that could not be written in a run folder or beside it: a full disk, no permission."""
    where = folder if error.filename is None else error.filename
    what = error.strerror or type(error).__name__
    saved = (folder / "checkpoints" / "last.ckpt").is_file()
    hint = f"; its last checkpoint is whole: make room and type resume={run_name(folder)}" if saved else ""
    return UserError(f"{where} could not be written: {what}{hint}")
