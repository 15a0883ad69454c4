"""status.json of a run: how far it is, and how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json

State = Literal["running", "finished", "failed", "interrupted"]


def write_status(
    folder: Path, state: State, *, step: int, steps: int, error: str | None = None, parent: str | None = None
) -> None:
    """`step` of `steps` optimizer steps are done; `error` is one line; `parent`: the run@step it was forked from."""
    status = {"state": state, "step": step, "steps": steps, "error": error}
    write_json(folder / "status.json", status | ({} if parent is None else {"parent": parent}))


def read_status(folder: Path) -> dict[str, Any]:
    """{} when the run never came to write one."""
    path = folder / "status.json"
    if not path.is_file():
        return {}
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object; remove it")
    return status
