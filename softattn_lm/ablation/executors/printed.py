"""No executor: the commands of the runs that can start now, for whatever scheduler there is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from softattn_lm.ablation.executors.base import train_words
from softattn_lm.ablation.jobs import Configs, Job, make_folder


def commands(folder: Path, jobs: Sequence[Job], configs: Configs, execution: Sequence[str]) -> Iterator[str]:
    """One line each; the run folders are made, so that a command is short and the same on every machine. When all have
    ended, the same `ablate` prints those of the next stage, or writes the report.
    """
    for job in jobs:
        run = make_folder(folder, job, configs.of_job(job, str(folder.parent)))
        yield shlex.join(["softattn", "train", *train_words(run, folder.parent, execution)])
