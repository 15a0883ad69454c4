"""Slots of this machine: whose cores a run is on, and how busy they were."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from softattn_lm.ablation.executors import slots
from softattn_lm.ablation.executors.local import Local
from softattn_lm.ablation.executors.slots import Slot, core_sets, make_slots
from softattn_lm.ablation.executors.warm import Warm
from softattn_lm.ablation.jobs import Configs, Job, make_folder
from softattn_lm.ablation.question import make_plan
from softattn_lm.commands.ablate import composed
from softattn_lm.runs.files import write_json
from tests.ablation import quick, words

needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="cores are shared out from two on"
)


@needs_two_cores
def test_runs_are_kept_on_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wandered over all of them, and met there."""
    quick(monkeypatch)
    typed = words(tmp_path, "logger=none", "steps=100000")
    typed = [word for word in typed if not word.startswith(("lines=", "runs="))]
    plan = make_plan({"arms": {"a": [], "b": []}}, typed, "x")
    folder = tmp_path / "runs" / "x"
    configs = Configs(plan, composed)
    here = Local(folder, folder.parent, make_slots(2, 1, 1, on_gpu=False, pin=True), Warm())
    try:
        for arm in plan.arms:
            job = Job("report", arm, 0, 1e-3)
            here.start(make_folder(folder, job, configs.of_job(job, str(folder.parent))))
        assert _settled(here.slots, here) == [set(slot.cpus) for slot in here.slots]
        assert not {*here.slots[0].cpus} & {*here.slots[1].cpus}
    finally:
        here.stop(kill=True)
        here.close()


def _settled(running: list[Slot], here: Local) -> list[set[int]]:
    """The cores on which the processes may be, once these are no longer those of the server."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert not here.wait(0.05), "a run has ended"
        if all(slot.pid for slot in running):
            found = [os.sched_getaffinity(slot.pid or 0) for slot in running]
            if os.sched_getaffinity(0) not in found:
                return found
    raise AssertionError("nobody is kept anywhere")


def test_cores_are_shared_out_only_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 11, 13, 17}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    assert core_sets(3, 2) == [(2, 3), (5, 7), (11, 13)]
    assert core_sets(3, 3) == [(), (), ()] and core_sets(8, 1) == [()] * 8
    monkeypatch.setattr(slots, "cores", lambda: 7)
    assert [slot.cpus for slot in make_slots(2, 1, 1, on_gpu=False, pin=True)] == [(2, 3, 5), (7, 11, 13)]
    assert [slot.cpus for slot in make_slots(2, 1, 4, on_gpu=False, pin=True)] == [(), ()], "a run has four processes"
    assert [slot.cpus for slot in make_slots(2, 1, 1, on_gpu=False)] == [(), ()]


def test_how_well_the_slots_were_used_is_told(tmp_path: Path) -> None:
    def row(slot: int, run: str, start: float, end: float) -> str:
        return json.dumps({"slot": slot, "run": run, "start": start, "end": end}) + "\n"

    old = row(0, "report/a/seed-1", 10, 20)
    new = [
        row(0, "report/a/seed-0", 100, 104),
        row(1, "report/b/seed-0", 100, 102),
        row(1, "report/a/seed-1", 102, 103),
    ]
    (tmp_path / slots.FILE).write_text("".join([old, *new]) + '{"slot": 1, "run": "torn')
    assert slots.use(tmp_path, 2, since=99) == "slots were busy 88 % of the time"
    for run, seconds in (("report/a/seed-0", 3.5), ("report/b/seed-0", 1.3), ("report/a/seed-1", 0.1)):
        (tmp_path / run).mkdir(parents=True)
        write_json(tmp_path / run / "summary.json", {"seconds": seconds})
    # (0.5 + 0.7) / 2: the third was continued.
    assert slots.use(tmp_path, 2, since=99) == "slots were busy 88 % of the time, 0.6 s per run beside its training"
    assert slots.use(tmp_path, 2, since=200) is None


PRELOADED = """
import sys
from softattn_lm.commands import worker
worker._import_everything(["wandb"])
before = set(sys.modules)
from softattn_lm.cli import main
try:
    main("train", sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
print(sorted(set(sys.modules) - before), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_run_that_logs_to_wandb_imports_nothing_anew(tmp_path: Path) -> None:
    """wandb.init went on importing for a second in every run, though the server had imported wandb."""
    typed = [word for word in words(tmp_path, "logger=wandb", "steps=2") if not word.startswith("lines=")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED, *typed], capture_output=True, text=True, env=environment, check=True
    )
    imported = ast.literal_eval(done.stderr.strip().splitlines()[-1])
    assert len(imported) < 20, imported


def test_measuring_alone_has_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Local(tmp_path, tmp_path, [Slot(0, 2, 1, cpus=(0,))], Warm())
    orders: list[dict[str, object]] = []
    monkeypatch.setattr(here.warm, "order", lambda order: orders.append(order) or 1)
    monkeypatch.setattr(here.warm, "answers", lambda _: [{"id": 1, "code": 0}])
    assert here.measure(tmp_path / "job", tmp_path / "out", tmp_path / "log") == 0
    assert orders[0]["cpus"] == [] and orders[0]["threads"] == 2
