"""Signals: the step is finished and saved, the process leaves within ten seconds, and what follows is as if nothing
had been."""

import json
import signal
import time

import pytest
from rich.console import Console

from softattn_lm.commands import sweep
from softattn_lm.runs.config import read_config
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import read_checkpoint
from softattn_lm.training.console import RunConsole
from softattn_lm.training.run import train
from tests import sabotage
from tests.tiny_run import losses, tiny_train
from tests.warm import Child, tiny_words

STATUS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 129)]
SETTINGS = ("steps=8", "training.val_every=4", "training.log_every=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    return tiny_train(tmp_path_factory.mktemp("whole"), *SETTINGS)


def rows(run):
    return [{**row, "seconds": 0} for row in read_metrics(run)]


def left_for(child, run, status, began=None):
    """The run was left (in time, where the test saw when it was told), said how to go on, and can."""
    assert child.wait() == status, child.said
    assert began is None or time.monotonic() - began < 10
    assert "Traceback" not in child.said and f"resume={run.name}" in child.said
    found = read_status(run)
    assert found["state"] == "interrupted"
    return found["step"]


def is_the_same_in_the_end(run, whole):
    train(read_config(run), run, resume=True, console=Console(quiet=True))
    assert rows(run) == rows(whole)
    assert (run / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert read_status(run)["state"] == "finished"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize(("number", "status"), STATUS)
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_in_training_the_step_is_finished_and_saved(tmp_path, whole, number, status, group):
    """The group is the process and its loader workers, as for Ctrl-C in a terminal."""
    workers = 2 * group
    words = tiny_words(tmp_path, "name=a", *SETTINGS, f"training.num_workers={workers}")
    child = Child(tmp_path, *words, sabotage=sabotage.slow_steps, arguments=(0.05,))
    run = tmp_path / "runs" / "a"
    child.when(lambda: len(losses(run)) >= 2)
    began = time.monotonic()
    child.signal(number, group)
    assert 2 <= left_for(child, run, status, began) < 8
    is_the_same_in_the_end(run, whole)


@pytest.mark.parametrize(("number", "status", "step"), [(*STATUS[0], 4), (*STATUS[1], 8), (*STATUS[2], 4)])
def test_in_a_validation_of_a_minute_nobody_waits_for_its_end(tmp_path, whole, number, status, step):
    """The step before it is saved; the validation, the last one of the run too, is done as a whole later."""
    settings = [f"training.val_every={step}" if "val_every" in word else word for word in SETTINGS]
    mark, run = tmp_path / "mark", tmp_path / "runs" / "a"
    reference = whole if step == 4 else tiny_train(tmp_path, *settings, "name=whole")
    child = Child(
        tmp_path, *tiny_words(tmp_path, "name=a", *settings),
        sabotage=sabotage.slow_validation, arguments=(mark, 1.6),
    )  # fmt: skip
    child.when(mark.exists)
    began = time.monotonic()
    child.signal(number)
    assert left_for(child, run, status, began) == step
    assert not [row for row in read_metrics(run) if row["kind"] == "validation"]
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == step
    is_the_same_in_the_end(run, reference)


def test_in_a_checkpoint_write_the_write_is_finished(tmp_path, whole):
    mark, run = tmp_path / "mark", tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.save_every=2")
    child = Child(tmp_path, *words, sabotage=sabotage.within_save, arguments=(2, "last", mark, 1.0))
    child.when(mark.exists)
    began = time.monotonic()
    child.signal(signal.SIGTERM)
    assert left_for(child, run, 143, began) in (2, 3)
    is_the_same_in_the_end(run, whole)


def test_a_second_signal_ends_the_process_at_once_and_the_last_checkpoint_stays(tmp_path, whole):
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.save_every=1")
    child = Child(tmp_path, *words, sabotage=sabotage.slow_steps, arguments=(1.5,))
    child.when(lambda: (run / "checkpoints" / "last.ckpt").exists())
    time.sleep(0.5)  # into the next step, which takes three seconds
    child.signal(signal.SIGINT)
    time.sleep(0.2)
    child.signal(signal.SIGINT)
    assert child.wait(5) == 130, child.said
    assert read_status(run)["state"] == "interrupted"
    assert read_status(run)["error"].startswith("interrupted by Ctrl-C at step ")
    is_the_same_in_the_end(run, whole)


@pytest.mark.parametrize(("number", "status"), STATUS[1:])
def test_before_the_first_step_it_leaves_at_once(tmp_path, number, status):
    run, mark = tmp_path / "runs" / "a", tmp_path / "mark"
    child = Child(tmp_path, *tiny_words(tmp_path, "name=a"), sabotage=sabotage.slow_data, arguments=(mark,))
    child.when(mark.exists)
    child.signal(number)
    assert child.wait(10) == status
    assert read_status(run)["state"] == "interrupted" and "Traceback" not in child.said
    assert read_status(run)["error"] == f"interrupted by {signal.Signals(number).name} before the first step"


def test_a_terminal_that_closes_says_so_twice_and_the_step_is_saved_all_the_same(tmp_path, whole):
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS)
    child = Child(tmp_path, *words, sabotage=sabotage.terminal_closed, arguments=(2,))
    assert left_for(child, run, 129) == 3
    is_the_same_in_the_end(run, whole)


def test_under_nohup_a_terminal_that_closes_is_nothing(tmp_path, whole):
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS)
    child = Child(tmp_path, *words, sabotage=sabotage.under_nohup)
    child.when(lambda: len(losses(run)) >= 1)
    child.signal(signal.SIGHUP)
    assert child.wait() == 0, child.said
    assert rows(run) == rows(whole)


def test_where_nobody_reads_what_it_says_the_run_saves_and_ends_like_a_pipe(tmp_path, whole):
    """`softattn train | head -2`."""
    run = tmp_path / "runs" / "a"
    child = Child(tmp_path, *tiny_words(tmp_path, "name=a", *SETTINGS), sabotage=sabotage.unread)
    assert child.wait() == 141 and child.said == ""
    assert (read_status(run)["state"], read_status(run)["step"]) == ("interrupted", 1)
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == 1
    is_the_same_in_the_end(run, whole)


def test_a_log_on_a_full_disk_costs_a_run_its_words_only(tmp_path):
    with open("/dev/full", "w") as full:
        console = RunConsole()
        console.file = full
        console.print("one")
        console.print("two")
        assert console.quiet and not console.nobody_reads


@pytest.mark.slow
def test_a_sweep_stops_with_its_job_and_starts_no_other(tmp_path):
    words = tiny_words(tmp_path, "name=s", "steps=100000", "training.val_every=50000", "training.log_every=1")
    child = Child(tmp_path, "-m", *words, "seed=0,1")
    run = tmp_path / "runs" / "s" / "00-seed_0"
    child.when(lambda: len(losses(run)) >= 2, 120)
    began = time.monotonic()
    child.signal(signal.SIGUSR1)
    assert child.wait() == 143, child.said
    assert time.monotonic() - began < 10
    assert read_status(run)["state"] == "interrupted"
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert [path.name for path in (tmp_path / "runs" / "s" / "jobs").iterdir()] == ["00-seed_0.yaml"]


def test_a_stopped_sweep_has_the_exit_status_of_the_signal(tmp_path, monkeypatch):
    def stopped(command):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not stopped")

    monkeypatch.setattr(sweep, "_run_child", stopped)
    with pytest.raises(SystemExit) as stop:
        sweep.sweep(sweep.COMMANDS["train"], ["seed=0,1", f"runs={tmp_path}", "name=s"])
    assert stop.value.code == 143
    assert json.loads((tmp_path / "s" / "00-seed_0" / "status.json").read_text())["state"] == "interrupted"


def test_a_run_in_training_is_not_continued_a_second_time(tmp_path, whole):
    run = tmp_path / "runs" / "a"
    child = Child(tmp_path, *tiny_words(tmp_path, "name=a", *SETTINGS), sabotage=sabotage.slow_steps, arguments=(0.3,))
    child.when(lambda: len(losses(run)) >= 1)
    second = Child(tmp_path, "resume=a", file="second.txt")
    assert second.wait() == 2 and "run a is being trained by another process" in second.said
    assert child.wait() == 0, child.said
    assert rows(run) == rows(whole)


def test_killed_beside_its_loader_processes_it_can_be_continued_at_once(tmp_path, whole):
    """They notice only after some seconds that their run is gone."""
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.num_workers=2", "training.save_every=2")
    child = Child(tmp_path, *words, sabotage=sabotage.slow_steps, arguments=(0.1,))
    child.when(lambda: (run / "checkpoints" / "last.ckpt").exists())
    child.signal(signal.SIGKILL)
    assert child.wait() == 128 + signal.SIGKILL
    is_the_same_in_the_end(run, whole)
