"""<folder>/log.jsonl: what happened to an ablation, one row per event, added and never rewritten.

{"event": "planned" | "edited" | "added_seeds" | "added_arms" | "grid_extended" | "chosen_rate" | "matched" |
          "read_test" | "started" | "stopped" | "failed", "time": seconds since 1970, ...}
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from softattn_lm.errors import UserError
from softattn_lm.runs.files import finite_or_null

FILE = "log.jsonl"


def append(folder: Path, event: str, **values: Any) -> dict[str, Any]:
    """An infinite number becomes null: JSON knows no other."""
    row: dict[str, Any] = {"event": event, "time": round(time.time(), 3), **finite_or_null(values)}
    path = folder / FILE
    with path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"  # by a process that was killed while it wrote
        else:
            torn = False
        file.write((b"\n" if torn else b"") + json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return row


def read(folder: Path, *events: str) -> list[dict[str, Any]]:
    """The rows, or those of these events. What a killed process left of a row is passed over.

    Raises UserError for a row that is whole and no event.
    """
    path = folder / FILE
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else [], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or "event" not in row:
            raise UserError(f"{path} is damaged: line {number} is no event; remove that line")
        if not events or row["event"] in events:
            rows.append(row)
    return rows
