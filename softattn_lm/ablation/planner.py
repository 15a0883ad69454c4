"""Keeps an executor busy with the runs that an ablation still needs, until none is left.

Nothing is remembered but on disk: finished runs are skipped, broken ones continued, and a failing one is named with its
reason while the rest go on.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from softattn_lm.ablation import journal
from softattn_lm.ablation.executors import Ended, Executor
from softattn_lm.ablation.executors.base import WORKER
from softattn_lm.ablation.jobs import Configs, Job, make_folder
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.stages import Stages
from softattn_lm.errors import UserError
from softattn_lm.runs.status import read_status, write_status

LOOK = 0.5  # seconds between two looks at running processes
TRIES = 2  # of a run whose process was killed from outside
ENDING = 90.0  # seconds to wait for the processes of a planner that was killed: they save and end


class Watcher(Protocol):
    """Is told how far everything is."""

    def update(self, jobs: list[Job], done: set[str], running: dict[str, float], took: dict[str, float]) -> None:
        """jobs: all that are known; done: paths of those that ended; running: path -> when it started, monotonic; took:
        path -> seconds, of those that finished here from their first step on.
        """
        ...

    def say(self, line: str) -> None: ...


@dataclass
class Result:
    """failed: path of a run, or an arm -> reason. stopped: by a signal, with runs left to do."""

    finished: int = 0
    diverged: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    left: int = 0


class Planner:
    """stops: how many signals have come that end it; from the second on runs are killed, which would save first.
    unfit: arms that cannot be built, and why.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        configs: Configs,
        executor: Executor,
        watcher: Watcher,
        stops: Callable[[], int],
        unfit: dict[str, str] | None = None,
    ) -> None:
        self.plan, self.folder, self.configs = plan, folder, configs
        self.executor, self.watcher, self.stops = executor, watcher, stops
        self.unfit = dict(unfit or {})
        fit = replace(plan, arms={arm: words for arm, words in plan.arms.items() if arm not in self.unfit})
        self.stages = Stages(fit, folder, configs)
        self.running: dict[Path, tuple[Job, float, bool]] = {}  # when it started, and whether at its first step
        self.took: dict[str, float] = {}
        self._tries: Counter[str] = Counter()

    def run(self) -> Result:
        """Until nothing can be run any more, or a signal comes; then all runs save first."""
        journal.append(self.folder, "started", process=os.getpid())
        for arm, reason in self.unfit.items():
            journal.append(self.folder, "failed", run=None, arm=arm, reason=reason)
            self.watcher.say(f"arm {arm} is left out: {reason}")
        while True:
            if self.stops():
                self._stop_all()
                break
            waiting = [job for job in self.stages.needed() if self.folder / job.path not in self.running]
            for job in waiting[: self.executor.free()]:
                self._start(job)
            if not self.running or not self.executor.waits:
                self.executor.wait(0.0)
                break
            self._tell()
            for ended in self.executor.wait(LOOK):
                self._ended(ended)
        self._tell()
        result = self._result()
        journal.append(self.folder, "stopped", by="signal" if result.stopped else "end", left=result.left)
        return result

    def _start(self, job: Job) -> None:
        try:
            config = self.configs.of_job(job, str(self.folder.parent))
        except UserError as error:
            self._give_up(job, str(error))
            return
        whole = not (self.folder / job.path).is_dir()
        folder = make_folder(self.folder, job, config)
        self._tries[job.path] += 1
        self.running[folder] = (job, time.monotonic(), whole)
        self.executor.start(folder)

    def _ended(self, ended: Ended) -> None:
        job, since, whole = self.running.pop(ended.run)
        found = self.stages.outcome(job)
        if found.end == "finished" and whole:
            self.took[job.path] = time.monotonic() - since
        elif found.end == "diverged":
            self.watcher.say(f"{job.path} diverged: {found.error}")
        elif found.end == "failed":
            self._give_up(job, found.error or ended.reason)
        elif found.end == "broken":
            killed = ended.code is None or ended.code < 0 or read_status(ended.run).get("state") == "interrupted"
            if killed and self._tries[job.path] < TRIES:
                self.watcher.say(f"{job.path}: {ended.reason}; it is continued")
            else:
                self._mark(ended)
                self._give_up(job, found.error or ended.reason)

    def _mark(self, ended: Ended) -> None:
        """What a killed process could not say itself."""
        status = read_status(ended.run)
        if status.get("state") in (None, "running"):
            step, steps = status.get("step", 0), status.get("steps", 0)
            write_status(ended.run, "failed", step=step, steps=steps, error=ended.reason)
        if (ended.run / "wandb").is_dir():
            subprocess.run([sys.executable, "-m", WORKER, "--failed", str(ended.run)], check=False)

    def _give_up(self, job: Job, reason: str) -> None:
        self.stages.given_up[job.path] = reason
        journal.append(self.folder, "failed", run=job.path, arm=job.arm, reason=reason)
        self.watcher.say(f"{job.path} failed: {reason}")

    def _stop_all(self) -> None:
        self.executor.stop()
        killed = False
        while self.running:
            if self.stops() > 1 and not killed:
                self.executor.stop(kill=True)
                killed = True
            for ended in self.executor.wait(LOOK):
                self.running.pop(ended.run, None)

    def _tell(self) -> None:
        jobs = self.stages.known()
        done = {job.path for job in jobs if self.stages.outcome(job).end in ("finished", "diverged")}
        done |= self.stages.given_up.keys()
        running = {job.path: since for job, since, _ in self.running.values()}
        self.watcher.update(jobs, done, running, self.took)

    def _result(self) -> Result:
        ends = Counter(self.stages.outcome(job).end for job in self.stages.known())
        left = sum(ends.values()) - ends["finished"] - ends["diverged"]
        failed = self.unfit | self.stages.given_up
        return Result(ends["finished"], ends["diverged"], failed, self.stops() > 0, left)


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[int]:
    """One planner at a time, and none while processes of a killed one still save. Gives the descriptor of the lock,
    which the runs inherit: it is held until the last of them has ended.

    Raises UserError when somebody else is at work on the ablation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        deadline, told = time.monotonic() + ENDING, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline or _alive(folder):
                    raise UserError(
                        f"another process is at work on {folder}; wait for it, or stop it, and type this again"
                    ) from None
            if not told:
                say("runs of an earlier process, which was killed, are saving")
                told = True
            time.sleep(0.2)
        (folder / ".lock").write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield file.fileno()


def _alive(folder: Path) -> bool:
    """Whether the planner that wrote the lock still lives, on this machine."""
    text = (folder / ".lock").read_text(encoding="utf-8").strip()
    try:
        os.kill(int(text), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
