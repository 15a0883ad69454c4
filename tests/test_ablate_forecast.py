"""How long an ablation still takes, of arms that differ tenfold in length: a schedule, worked out by hand."""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from softattn_lm.ablation.executors import Ended
from softattn_lm.ablation.forecast import START, expected, measured_alone, seconds_left
from softattn_lm.ablation.jobs import Configs, Job
from softattn_lm.ablation.planner import Planner
from softattn_lm.ablation.stages import Stages
from softattn_lm.commands.ablate_progress import Progress
from tests.test_ablate_plan import composed, forge, make, parabola, tuned

ALONE: dict[tuple[str | None, str], float] = {(None, "a"): 60.0, (None, "b"): 600.0}
JOBS = [Job("report", arm, seed, 1e-3) for seed in range(2) for arm in "ab"]


@pytest.mark.parametrize(
    ("done", "running", "slots", "seconds"),
    [
        # a0 0-60, b0 0-600, a1 60-120, b1 120-720: all of it over two slots would be 660.
        (0, {}, 2, 720),
        (0, {}, 1, 1320),
        (0, {}, 9, 600),
        # The last run has one slot to itself, whatever else is free.
        (3, {}, 2, 600),
        (3, {"report/b/seed-1": 250.0}, 2, 350),
        (1, {"report/b/seed-0": 580.0}, 2, 620),
        # A run that takes longer than it should is about to end.
        (1, {"report/b/seed-0": 700.0}, 1, 660),
    ],
)
def test_the_runs_that_are_left_are_laid_out_on_the_slots(
    done: int, running: dict[str, float], slots: int, seconds: float
) -> None:
    ended = {job.path for job in JOBS[:done]}
    assert seconds_left(JOBS, ended, running, ALONE, slots) == seconds


def test_a_run_takes_what_its_arm_took_and_before_that_what_it_was_measured_to_times_what_others_were_slower() -> None:
    sized = [*JOBS, Job("report", "b", 0, 1e-3, size="micro")]
    assert expected(sized, ALONE | {("micro", "b"): 6000.0}, {}) == ALONE | {("micro", "b"): 6000.0}
    took = {"report/a/seed-0": 90.0, "report/a/seed-1": 100.0}
    found = expected(sized, ALONE | {("micro", "b"): 6000.0}, took)
    assert found == {(None, "a"): 95.0, (None, "b"): 950.0, ("micro", "b"): 9500.0}
    # Its own runs tell more than those of others.
    assert expected(JOBS, ALONE, took | {"report/b/seed-0": 660.0})[None, "b"] == 660.0
    # Nothing measured, as of a custom executor: the runs themselves tell.
    assert expected(JOBS, {}, took) == {(None, "a"): 95.0, (None, "b"): 95.0}


def test_reporting_waits_for_the_last_tuning_run_of_its_size_and_of_no_other() -> None:
    jobs = [Job("tune", "a", 1000, 1e-3, "one", 1.0), Job("tune", "b", 1000, 1e-3, "one", 1.0)]
    jobs += [Job("report", "a", 0, 1e-3, "one"), Job("report", "b", 0, 1e-3, "two")]
    each = {("one", "a"): 10.0, ("one", "b"): 100.0, ("two", "b"): 5.0}
    # a is tuned 0-10, b 0-100; the other size reports 10-15, and a reports from 100 on.
    assert seconds_left(jobs, set(), {}, each, 2) == 110
    assert seconds_left(jobs[:3], {jobs[0].path}, {jobs[1].path: 99.0}, each, 2) == 11


def test_a_sweep_that_is_nearly_done_says_how_long_its_last_long_runs_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean over all runs and slots said a minute and a half where six were to come."""
    plan = make({"tune": "lr", "seeds": 3, "lines": False})
    stages = tuned(tmp_path, plan, parabola({"a": 1e-3, "b": 1e-3}))
    jobs = stages.known()
    took = {job.path: 20.0 if job.arm == "a" else 400.0 for job in jobs if job.stage == "tune"}
    for job in stages.needed()[:-1]:
        forge(tmp_path, job, 2.0)
        took[job.path] = 21.0 if job.arm == "a" else 410.0
    done = {job.path for job in jobs if stages.outcome(job).end == "finished"}
    (last,) = (job for job in jobs if job.path not in done)
    assert last == Job("report", "b", 2, 1e-3)
    with Progress(ALONE, slots=2) as progress:
        progress.update(jobs, done, {last.path: time.monotonic() - 40.0}, took)
    assert "35 of 36 runs done, 1 running, 6m0" in capsys.readouterr().out


class Forging:
    """An executor that leaves of each run what `ends` says, a list per run: a loss, infinite for one that diverged, or
    None for a process that was killed.
    """

    waits = True

    def __init__(self, root: Path, jobs: list[Job], ends: list[list[float | None]]) -> None:
        self.root, self.ends = root, {root / job.path: (job, [*of]) for job, of in zip(jobs, ends, strict=True)}
        self.running: list[Path] = []

    def free(self) -> int:
        return 1 - len(self.running)

    def start(self, run: Path) -> None:
        self.running.append(run)

    def wait(self, seconds: float) -> list[Ended]:
        ended, self.running = self.running, []
        for run in ended:
            job, ends = self.ends[run]
            loss = ends.pop(0)
            if loss is not None:
                (run / "config.yaml").unlink()
                (run / "versions.json").unlink()
                run.rmdir()
                forge(self.root, job, loss)
        return [Ended(run, 0 if (run / "status.json").is_file() else -9) for run in ended]

    def stop(self, kill: bool = False) -> None: ...

    def close(self) -> None: ...


class Watching:
    took: dict[str, float]

    def update(self, jobs: list[Job], done: set[str], running: dict[str, float], took: dict[str, float]) -> None:
        self.took = took

    def say(self, line: str) -> None: ...


def test_only_a_run_that_finished_in_one_go_tells_what_a_run_takes(tmp_path: Path) -> None:
    plan = make({"lines": False})
    configs = Configs(plan, lambda words: composed(words) | {"training": {}})
    jobs = Stages(plan, tmp_path, configs).needed()
    ends: list[list[float | None]] = [[2.0], [None, 2.0], [math.inf], [2.0]]
    watching = Watching()
    result = Planner(plan, tmp_path, configs, Forging(tmp_path, jobs, ends), watching, lambda: 0).run()
    assert (result.finished, result.diverged) == (3, 1)
    assert sorted(watching.took) == [jobs[0].path, jobs[3].path]
    assert all(0 <= seconds < 60 for seconds in watching.took.values())


def test_an_arm_that_cannot_be_tuned_is_no_longer_waited_for(tmp_path: Path) -> None:
    plan = make({"tune": "lr", "seeds": 3, "lines": False})
    stages = Stages(plan, tmp_path, Configs(plan, composed))
    before = stages.known()
    stages.given_up[next(job.path for job in before if job.arm == "b")] = "its code raises"
    assert [job for job in before if job not in stages.known()] == [Job("report", "b", seed, 1e-3) for seed in range(3)]


def test_the_reference_is_taken_for_as_slow_as_the_baseline() -> None:
    cost: dict[str, Any] = {"steps": 100, "seconds_per_step": 0.5}
    costs = {None: {"a": cost, "b": cost | {"steps": 10}}}
    alone = {(None, "a"): 50.0 + START, (None, "b"): 5.0 + START, (None, "uniform"): 50.0 + START}
    assert measured_alone(make(), costs) == alone


def test_a_run_takes_its_start_and_its_validations_too() -> None:
    """35 runs of a third of a second were to take 0.1 minutes, which left out nine tenths of each."""
    cost = {"steps": 100, "seconds_per_step": 0.5, "tokens_per_second": 1000.0, "read_tokens": 36_000}
    # 36,000 tokens forward, of which 3,000 a second are read: a step passes forward once and back for as long as twice.
    assert measured_alone(make(), {None: {"a": cost}})[None, "a"] == 50.0 + 12.0 + START
