"""No executor: the commands of the runs that can start now, for whatever scheduler there is."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from softattn_lm.ablation.executors.base import train_words
from softattn_lm.ablation.jobs import Job, make_folder
from softattn_lm.ablation.stages import Stages
from softattn_lm.errors import UserError
from softattn_lm.runs.lock import is_in_hand


@dataclass
class Printed:
    """commands: a line each, for any shell and in any folder. at_work: paths of runs that a process trains now. failed:
    path of a run -> why, and what tries it again.
    """

    commands: list[str] = field(default_factory=list)
    at_work: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def commands(stages: Stages, folder: Path, execution: Sequence[str]) -> Printed:
    """The run folders are made, so that a command is short and the same on every machine. When all have ended, the same
    `ablate` gives those of the next stage, or none.

    A run that failed is not among them, or the others would wait for it for ever; what waits in a queue is, and does
    nothing when it has been done meanwhile.
    """
    failed: dict[str, str] = {}
    while True:
        found = Printed(failed=failed)
        for job in stages.needed():
            if is_in_hand(folder / job.path):
                found.at_work.append(job.path)
                continue
            try:
                run = make_folder(folder, job, stages.configs.of_job(job, str(folder.parent)))
            except UserError as error:
                stages.given_up[job.path] = failed[job.path] = str(error)
                continue
            if reason := _failed(stages, job):
                stages.given_up[job.path] = reason
                failed[job.path] = f"{reason}; what tries it again: {_command(run, folder.parent, execution)}"
            else:
                found.commands.append(_command(run, folder.parent, execution))
        if found.commands or found.at_work or not stages.needed():
            return found


def _failed(stages: Stages, job: Job) -> str | None:
    found = stages.outcome(job)
    return (found.error or "it failed") if found.end == "failed" else None


def _command(run: Path, runs: Path, execution: Sequence[str]) -> str:
    """Settings name texts and kernels as they lie from here, so the run starts here."""
    train = [sys.executable, "-m", "softattn_lm", "train", *train_words(run.resolve(), runs.resolve(), execution)]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(train)}"
