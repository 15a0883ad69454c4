"""SLURM: SIGUSR1 saves and requeues, and the same command, started again, goes on with the same run."""

import json
import signal
import stat
from pathlib import Path

import pytest

from softattn_lm.commands import train
from softattn_lm.config.settings import TrainerSettings, TrainingSettings
from softattn_lm.errors import UserError
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.runs.status import read_status, write_status
from softattn_lm.training import slurm
from softattn_lm.training.launch import SLURMEnvironment, make_trainer
from tests import sabotage
from tests.tiny_run import losses, tiny_train
from tests.warm import Child, tiny_words

SETTINGS = ("steps=8", "training.val_every=4", "training.log_every=1", "training.save_every=2")
SCONTROL = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\nexit {status}\n'


@pytest.fixture
def scontrol(tmp_path):
    """Makes a stub; what it was asked is in the file it returns. The environment is that of the job."""

    def make(status=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "scontrol").write_text(SCONTROL.format(status=status))
        (folder / "scontrol").chmod(stat.S_IRWXU)
        return folder / "asked", {"SLURM_JOB_ID": "4711", "PATH": f"{folder}:/usr/bin:/bin"}

    return make


def test_sigusr1_requeues_and_the_requeued_command_continues_the_same_folder(tmp_path, scontrol):
    (tmp_path / "elsewhere").mkdir()
    whole = tiny_train(tmp_path / "elsewhere", *SETTINGS)
    asked, job = scontrol()
    words = tiny_words(tmp_path, *SETTINGS)  # no name: the folder is called after the time
    child = Child(tmp_path, *words, sabotage=sabotage.slow_steps, arguments=(0.1,), environment=job)
    child.when(lambda: any(len(losses(run)) >= 2 for run in (tmp_path / "runs").glob("2*")))
    child.signal(signal.SIGUSR1)
    assert child.wait() == 143, child.said
    assert asked.read_text() == "requeue 4711\n"
    assert "job 4711 is requeued" in child.said
    (run,) = (tmp_path / "runs").glob("2*")
    assert read_status(run)["state"] == "interrupted"
    child = Child(tmp_path, *words, environment=job | {"SLURM_RESTART_COUNT": "1"})
    assert child.wait() == 0, child.said
    assert [path.name for path in (tmp_path / "runs").glob("2*")] == [run.name]
    assert [{**row, "seconds": 0} for row in read_metrics(run)] == [{**r, "seconds": 0} for r in read_metrics(whole)]
    child = Child(tmp_path, *words, environment=job | {"SLURM_RESTART_COUNT": "2"})
    assert child.wait() == 0 and "already at step 8 of 8" in child.said
    assert asked.read_text() == "requeue 4711\n"


def test_what_ends_a_run_otherwise_requeues_nothing(tmp_path, scontrol):
    asked, job = scontrol()
    for number, environment in ((signal.SIGTERM, job), (signal.SIGUSR1, {"PATH": job["PATH"]})):
        child = Child(
            tmp_path, *tiny_words(tmp_path, *SETTINGS, f"name=a{number}"),
            sabotage=sabotage.slow_steps, arguments=(0.1,), environment=environment,
        )  # fmt: skip
        child.when(lambda run=tmp_path / "runs" / f"a{number}": len(losses(run)) >= 2)
        child.signal(number)
        assert child.wait() == 143, child.said
    assert not asked.exists()


@pytest.mark.parametrize("slow", [sabotage.slow_settings, sabotage.slow_data])
def test_a_job_whose_time_is_up_before_the_first_step_is_requeued_too(tmp_path, scontrol, slow):
    asked, job = scontrol()
    mark, words = tmp_path / "mark", tiny_words(tmp_path, *SETTINGS)
    child = Child(tmp_path, *words, sabotage=slow, arguments=(mark,), environment=job)
    child.when(mark.exists)
    child.signal(signal.SIGUSR1)
    assert child.wait() == 143, child.said
    assert asked.read_text() == "requeue 4711\n" and child.said == "job 4711 is requeued\n"
    child = Child(tmp_path, *words, environment=job | {"SLURM_RESTART_COUNT": "1"})
    assert child.wait() == 0, child.said
    (run,) = (tmp_path / "runs").glob("2*")
    assert read_status(run)["state"] == "finished"


def test_two_runs_of_one_job_that_are_requeued_at_once_are_both_continued(tmp_path, scontrol):
    _, job = scontrol()
    words = tiny_words(tmp_path, *SETTINGS)

    def both(number, environment, **given):
        files = [f"{number}{which}.txt" for which in "ab"]
        return [Child(tmp_path, *words, environment=job | environment, file=file, **given) for file in files]

    children = both(1, {}, sabotage=sabotage.slow_steps, arguments=(0.1,))
    for child in children:
        child.when(lambda: sum(len(losses(run)) >= 2 for run in (tmp_path / "runs").glob("2*")) == 2)
        child.signal(signal.SIGUSR1)
    assert [child.wait() for child in children] == [143, 143]
    children = both(2, {"SLURM_RESTART_COUNT": "1"}, sabotage=sabotage.slow_mark)
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    assert [read_status(run)["state"] for run in (tmp_path / "runs").glob("2*")] == ["finished"] * 2


def test_a_requeue_that_fails_is_said_with_what_to_do(tmp_path, scontrol, monkeypatch):
    asked, job = scontrol(status=3)
    for name, value in (job | {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}).items():
        monkeypatch.setenv(name, value)
    assert slurm.requeue() == "job 12_3 could not be requeued: scontrol ended with 3"
    assert asked.read_text() == "requeue 12_3\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "could not be requeued" in slurm.requeue() and "scontrol" in slurm.requeue()


def life(monkeypatch, restarts, job="1"):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


def begin(root, command, name=None):
    """What the command does first: (run folder, whether it was there)."""
    begun = slurm.run_to_continue(root, name, command)
    folder = begun or new_run(root, name, {"seed": 0})
    slurm.remember(folder, command)
    return folder, begun is not None


def test_each_life_of_a_job_takes_up_its_runs_in_their_order(tmp_path, monkeypatch):
    life(monkeypatch, 0)
    first, second, other = (begin(tmp_path, command)[0] for command in (["a"], ["a"], ["b"]))
    assert len({first, second, other}) == 3  # the same command twice in one life makes two runs
    write_status(first, "finished", step=8, steps=8)
    life(monkeypatch, 0, job="2")
    assert begin(tmp_path, ["a"])[1] is False
    life(monkeypatch, 1)
    assert begin(tmp_path, ["a"]) == (first, True)  # which then says that it is finished
    assert begin(tmp_path, ["b"]) == (other, True)
    assert begin(tmp_path, ["a"]) == (second, True)
    assert begin(tmp_path, ["a"])[1] is False
    assert begin(tmp_path, ["c"])[1] is False


def test_a_name_of_ones_own_is_taken_up_again_and_by_nobody_else(tmp_path, monkeypatch):
    life(monkeypatch, 0)
    mine, _ = begin(tmp_path, ["name=mine"], "mine")
    life(monkeypatch, 1)
    assert begin(tmp_path, ["name=mine"], "mine") == (mine, True)
    life(monkeypatch, 2, job="2")
    with pytest.raises(UserError, match="name=mine is taken"):
        begin(tmp_path, ["name=mine"], "mine")
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UserError, match="name=mine is taken"):
        begin(tmp_path, ["name=mine"], "mine")


def test_the_other_processes_of_a_requeued_run_come_to_the_same_folder(tmp_path, monkeypatch):
    """The first may have put its mark already when they look."""
    life(monkeypatch, 0)
    mine, _ = begin(tmp_path, ["name=mine"], "mine")
    life(monkeypatch, 1)
    begin(tmp_path, ["name=mine"], "mine")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert slurm.run_to_continue(tmp_path, "mine", ["name=mine"]) == mine


def test_lightning_does_not_requeue_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_NODELIST", "localhost")
    trainer = make_trainer(
        TrainerSettings(accelerator="cpu"), TrainingSettings(), tmp_path, steps=1, validates=False, callbacks=[],
        loggers=[],
    )  # fmt: skip
    environment = trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment) and environment.auto_requeue is False


def test_the_mark_of_a_job_does_not_keep_a_refused_run(tmp_path, monkeypatch):
    life(monkeypatch, 0)
    from tests.tiny_run import tiny_config

    with pytest.raises(UserError):
        train.run(tiny_config(tmp_path, "tokens=5", "name=bad"), [], ["tokens=5", "name=bad"])
    assert not (tmp_path / "runs" / "bad").exists()
    assert json.loads(Path(begin(tmp_path / "runs", ["x"], "good")[0], "slurm.json").read_text())["job"] == "1"


@pytest.mark.parametrize("mark", ["garbage", "[]", '{"job": "1"}', '{"job": "1", "restarts": "x", "command": ["a"]}'])
def test_a_mark_that_is_none_and_a_count_that_is_no_number_keep_no_run_from_beginning(tmp_path, monkeypatch, mark):
    """The folder may be a stranger's, beside one's own."""
    life(monkeypatch, 0)
    own, _ = begin(tmp_path, ["a"])
    (new_run(tmp_path, "strangers", {"seed": 0}) / slurm.FILE).write_text(mark)
    life(monkeypatch, "x")
    assert slurm.run_to_continue(tmp_path, None, ["a"]) is None
    life(monkeypatch, 1)
    assert slurm.run_to_continue(tmp_path, None, ["a"]) == own
