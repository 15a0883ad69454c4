"""A run folder is made: whole and for one run only, or not at all. One that was never used is taken back."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from softattn_lm.errors import UserError
from softattn_lm.runs.config import write_config
from softattn_lm.runs.files import write_json
from softattn_lm.runs.names import runs_folder, valid_name
from softattn_lm.runs.versions import versions


def new_run(root: str | Path, name: str | None, config: dict[str, Any]) -> Path:
    """Make a run folder of its own below `root`, holding config.yaml and versions.json, and return it.

    Without a name the folder is called after the time and six random hex digits. The folder is made exclusively: of two
    runs that ask for the same name at the same moment one gets it. Raises UserError for a name that is taken or no
    name. Only a job that a sweep has written down has a name of two parts, <sweep>/<job>.
    """
    root = runs_folder(root)
    root.mkdir(parents=True, exist_ok=True)
    if name is not None:
        parts = name.split("/", 1) if _is_job(root / name) else [name]
        folder = root.joinpath(*map(valid_name, parts))
    else:
        folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    # Made aside and moved into its place: a process that is killed here leaves no half of a run under the name.
    waiting = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    waiting.mkdir()
    try:
        write_config(waiting, config)
        write_json(waiting / "versions.json", versions())
        os.rename(waiting, folder)  # which fails where there is a folder with something in it
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise UserError(
            f"name={name} is taken: {folder} exists; continue it with resume={name}, or type another name"
        ) from None
    finally:  # a signal too
        shutil.rmtree(waiting, ignore_errors=True)
    return folder


def discard_unbegun(folder: Path) -> None:
    """Remove the folder of a new run that was refused before its first step: it holds nothing, and its name is free.

    The folder of a sweep's job stays, and says why that job failed.
    """
    files = list(folder.iterdir())
    if not _is_job(folder) and all(_says_nothing(file) for file in files):
        for file in files:
            file.unlink()
        folder.rmdir()


def _says_nothing(file: Path) -> bool:
    if file.name in ("metrics.jsonl", "metrics.csv"):
        return not file.read_text(encoding="utf-8").strip()
    return file.name in ("config.yaml", "versions.json", "status.json", "slurm.json", "lock")


def _is_job(folder: Path) -> bool:
    return (folder.parent / "jobs" / f"{folder.name}.yaml").is_file()


def made_folder(folder: Path) -> Path:
    """For what a command is going to write. Raises UserError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror or error}; type another runs=") from None
    return folder
