"""Requeued by SLURM, the same command finds and continues the same run folder. No torch.

    <run>/slurm.json     {"job": "123", "restarts": 0, "command": ["steps=2000", ...]}

SLURM keeps a job's id when it is requeued and counts SLURM_RESTART_COUNT up. A job may start several runs, even by the
same command; each life of the job takes them up in the order in which they were made. Lightning's own requeueing saves
from inside the signal handler, in the middle of a step, and is off.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from softattn_lm.runs.files import write_json
from softattn_lm.runs.find import run_folders
from softattn_lm.runs.processes import is_first_process
from softattn_lm.runs.status import read_status

FILE = "slurm.json"
LOCK = ".slurm.lock"


def job_id() -> str | None:
    """As `scontrol` takes it, <array>_<task> in an array; None outside SLURM."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}") for part in ("JOB_ID", "TASK_ID"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def restarts() -> int:
    """How often this job was requeued; 0 where SLURM does not say it as a number."""
    said = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(said) if said.isascii() and said.isdigit() else 0


def remember(folder: Path, command: list[str]) -> None:
    """That this life of the job has this run in hand. Nothing outside SLURM."""
    if (job := job_id()) is not None:
        write_json(folder / FILE, {"job": job, "restarts": restarts(), "command": command})


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Of the processes of a job that look for their run below `root` at once, each waits until the one before it has
    put its mark. Nothing outside SLURM, and where the file system knows no locks."""
    if job_id() is None or os.name != "posix" or not root.is_dir():
        yield
        return
    import fcntl

    file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def run_to_continue(root: Path, name: str | None, command: list[str]) -> Path | None:
    """The folder in which an earlier life of this job, by the same command, began what is now to go on; else None.

    One that was interrupted since it was marked is taken up in any life: SLURM_RESTART_COUNT may not have been handed
    on.
    """
    job = job_id()
    if job is None:
        return None
    folders = run_folders(root) if name is None else [root / name]
    made = [(folder, found) for folder in folders if (found := _read(folder)) is not None]
    for folder, found in sorted(made, key=lambda pair: (pair[0] / "versions.json").stat().st_mtime_ns):
        earlier = found["restarts"] < restarts() or _interrupted_since(folder)
        # The other processes of a run look only after the first has put its mark.
        if (found["job"], found["command"]) == (job, command) and (earlier or not is_first_process()):
            return folder
    return None


def _interrupted_since(folder: Path) -> bool:
    """Whether it was interrupted after its mark: another process of this life has taken it in hand otherwise."""
    if read_status(folder).get("state") != "interrupted":
        return False
    return (folder / "status.json").stat().st_mtime_ns >= (folder / FILE).stat().st_mtime_ns


def _read(folder: Path) -> dict[str, Any] | None:
    """None where there is no such file, or one that is none of ours: the folder may come from anywhere."""
    file = folder / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and found.keys() >= {"job", "command"} and type(found.get("restarts")) is int
    return found if sound and (folder / "versions.json").is_file() else None


def requeue() -> str:
    """Asks SLURM to run this job again, and returns what to tell the person."""
    job = job_id()
    assert job is not None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {job} could not be requeued: {error}"
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        return f"job {job} could not be requeued: scontrol ended with {done.returncode} {said}".rstrip()
    return f"job {job} is requeued"
