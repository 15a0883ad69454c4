"""metrics.jsonl of a run, which is appended to row by row: read, and cut back to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from softattn_lm.errors import UserError
from softattn_lm.runs.files import replace_text


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A last line without its line break, left by a killed process, is dropped.

    Raises UserError naming the line that is no row.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or "kind" not in row:
            raise UserError(f"{path} is damaged: line {number} is no row of a run; remove that line")
        rows.append(row)
    return rows


def cut_metrics(folder: Path, step: int) -> None:
    """Drop the rows past `step`: what a run did after the checkpoint it is continued from, it is going to do again."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    replace_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
