"""SLURM through submitit: the same runs in the same folders, each a job of a job array.

    <folder>/submitted/jobs.json     run -> {"job": id, "cluster": "slurm"}: what an earlier call has submitted

submitit's local mode ("local") starts the same jobs as processes of this machine, and is what tests can run.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from softattn_lm.ablation.executors.base import Ended, train_words
from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json

MANY = 10_000  # runs at once: SLURM queues them
POLL = 0.2  # seconds between two looks at local jobs


class Trained:
    """What a job does: it trains in a process of its own, which saves when SLURM is about to end the job, and asks for
    the job to be queued again. Pickled by submitit, so it holds plain values only.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hand_on)
        self.child = subprocess.Popen([sys.executable, "-m", "softattn_lm", "train", *self.words])
        return self.child.wait()

    def _hand_on(self, number: int, frame: Any) -> None:
        if self.child is not None:
            self.child.send_signal(number)

    def checkpoint(self) -> Any:
        """Called by submitit in its handler of SIGUSR2, ahead of the time limit or when the job is pushed aside."""
        from submitit.helpers import DelayedSubmission

        if self.child is not None:
            self.child.send_signal(signal.SIGTERM)
            self.child.wait()
        return DelayedSubmission(Trained(self.words))


class Submitit:
    """waits: whether `wait` does, or whoever submitted leaves, and the same command goes on later."""

    def __init__(
        self,
        folder: Path,
        runs: Path,
        execution: Sequence[str],
        *,
        cluster: Literal["slurm", "local"],
        slots: int | None,
        threads: int,
        gpus: int,
        parameters: dict[str, Any],
        waits: bool = True,
    ) -> None:
        try:
            import submitit
        except ModuleNotFoundError:
            raise UserError(
                "executor=slurm needs submitit; in the checkout, type: pip install -c .ci/constraints.txt -e '.[slurm]'"
            ) from None
        self.folder, self.runs, self.execution = folder / "submitted", runs, list(execution)
        self.cluster, self.waits = cluster, waits or cluster == "local"
        self.slots = slots or (MANY if cluster == "slurm" else 1)
        try:
            self.executor = submitit.AutoExecutor(folder=self.folder / "%j", cluster=cluster)
            given = {"cpus_per_task": threads, "gpus_per_node": gpus, "timeout_min": 60 * 24 * 7} | parameters
            self.executor.update_parameters(name=folder.name, **given)
        except (RuntimeError, TypeError, ValueError, NameError) as error:
            raise UserError(f"submitit refuses executor={cluster}: {' '.join(str(error).split())[:300]}") from None
        self._submitit, self._alive = submitit, _queued() if cluster == "slurm" else set()
        self.running: dict[Path, Any] = {}
        self._waiting: list[Path] = []

    def free(self) -> int:
        return self.slots - len(self.running) - len(self._waiting)

    def start(self, run: Path) -> None:
        """Submitted together with others when `wait` is called, as one array; watched again if an earlier call has."""
        job = self._known().get(self._name(run))
        if job is not None and job["job"] in self._alive:
            self.running[run] = self._submitit.SlurmJob(self.folder / "%j", job["job"])
        else:
            self._waiting.append(run)

    def wait(self, seconds: float) -> list[Ended]:
        self._submit()
        deadline = time.monotonic() + seconds
        while self.waits and self.running and time.monotonic() < deadline:
            if ended := [run for run, job in self.running.items() if job.done()]:
                return [self._end(run) for run in ended]
            time.sleep(POLL)
        return []

    def stop(self, kill: bool = False) -> None:
        self._waiting.clear()
        for job in self.running.values():
            if kill or self.cluster == "slurm":
                job.cancel()
            else:
                job._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.waits:
            self.stop()

    def _submit(self) -> None:
        if not self._waiting:
            return
        tasks = [Trained(train_words(run.resolve(), self.runs.resolve(), self.execution)) for run in self._waiting]
        with self.executor.batch():
            jobs = [self.executor.submit(task) for task in tasks]
        self.running |= dict(zip(self._waiting, jobs, strict=True))
        self._remember(dict(zip(self._waiting, jobs, strict=True)))
        self._waiting = []

    def _remember(self, jobs: dict[Path, Any]) -> None:
        known = self._known()
        known |= {self._name(run): {"job": job.job_id, "cluster": self.cluster} for run, job in jobs.items()}
        write_json(self.folder / "jobs.json", known)

    def _known(self) -> dict[str, dict[str, str]]:
        file = self.folder / "jobs.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _name(self, run: Path) -> str:
        return run.relative_to(self.folder.parent).as_posix()

    def _end(self, run: Path) -> Ended:
        job = self.running.pop(run)
        try:
            code: int | None = job.result()
        except (RuntimeError, OSError, EOFError, AttributeError):
            # submitit's own errors are RuntimeErrors: the job was cancelled, lost, or died before it could say how.
            code = None
        return Ended(run, code)


def _queued() -> set[str]:
    """Ids of jobs that SLURM still has, <array>_<task> in an array; none where it cannot be asked."""
    try:
        said = subprocess.run(
            ["squeue", "-h", "-r", "-o", "%i"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(said.stdout.split())
