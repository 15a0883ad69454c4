"""wandb that refuses, never answers, fails in the middle or is slow: the run goes on at its speed, and says so once."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from softattn_lm.runs import cut_metrics, read_metrics
from softattn_lm.training.tracking import ANSWER, BEGIN, END
from tests.fake_wandb import deaf_server, fake_wandb, refusing_url, until
from tests.tiny_run import tiny_config, tiny_train

STEPS = 60
# Trains, and prints how long training took, and wandb's share before it and behind it, in seconds.
CHILD = """
import json, sys, time
from pathlib import Path
from rich.console import Console
from softattn_lm.training import run, tracking
spent = {}
def timed(name, function):
    def call(*given):
        began = time.perf_counter()
        try:
            return function(*given)
        finally:
            spent[name] = time.perf_counter() - began
    return call
run.make_loggers, run.finish_loggers = timed("begin", run.make_loggers), timed("end", run.finish_loggers)
cfg, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
summary = run.train(cfg, folder, console=Console(quiet=True))
print(json.dumps(spent | {"training": summary["seconds"]}))
"""


def train_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> tuple[dict[str, float], str, Path]:
    """(seconds, standard error, run folder) of a run in a process of its own, whose end wandb may hold up too."""
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    cfg = tiny_config(tmp_path, f"steps={STEPS}", "training.log_every=1", "training.val_every=30", "logger=wandb")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    began = time.perf_counter()
    words = [sys.executable, "-c", CHILD, json.dumps(cfg), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    spent = json.loads(done.stdout.splitlines()[-1])
    return spent | {"all": time.perf_counter() - began}, done.stderr, folder


def assert_whole(folder: Path) -> None:
    """Every step and every validation is in the record once, and the run is finished."""
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [30, 60]
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def warned(said: str) -> list[str]:
    return [line for line in said.splitlines() if "Warning: wandb" in line]


def test_a_server_that_takes_everything_gets_every_step_and_nothing_is_said(tmp_path, monkeypatch):
    with fake_wandb("well") as server:
        _, said, folder = train_with(tmp_path, monkeypatch, server.url)
        assert until(lambda: server.exit_codes, 5) and server.exit_codes == [0]
    assert_whole(folder)
    assert server.rows == STEPS and warned(said) == []


@pytest.mark.slow
def test_a_server_that_refuses_is_replaced_by_the_disk(tmp_path, monkeypatch):
    url = refusing_url()
    spent, said, folder = train_with(tmp_path, monkeypatch, url)
    assert_whole(folder)
    (line,) = warned(said)
    assert url in line and "refused" in line and "wandb sync" in line
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    assert spent["begin"] < 3 and spent["end"] < 3


@pytest.mark.slow
def test_a_server_that_never_answers_costs_a_few_seconds_at_the_start(tmp_path, monkeypatch):
    with deaf_server() as url:
        spent, said, folder = train_with(tmp_path, monkeypatch, url)
    assert_whole(folder)
    (line,) = warned(said)
    assert "timed out" in line and "wandb sync" in line
    assert ANSWER <= spent["begin"] < ANSWER + 3 and spent["end"] < 3


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["errors", "hangs"])
def test_a_server_that_fails_after_twenty_rows_does_not_hold_the_run_up(tmp_path, monkeypatch, behaviour):
    monkeypatch.setattr("tests.test_wandb_faults.STEPS", STEPS)
    with fake_wandb(behaviour) as server:
        spent, said, folder = train_with(tmp_path, monkeypatch, server.url)
    assert_whole(folder)
    (line,) = warned(said)
    assert "metrics.jsonl has" in line and f"{folder}/wandb/run-" in line
    assert server.rows >= 20
    assert spent["begin"] < BEGIN and spent["end"] < END + 3
    assert spent["all"] < 45, spent  # importing torch, training, and no more than END and a little at the end


@pytest.mark.slow
def test_a_slow_server_is_slow_for_itself(tmp_path, monkeypatch):
    with fake_wandb("slow") as server:
        spent, _, folder = train_with(tmp_path, monkeypatch, server.url)
    assert_whole(folder)
    assert spent["begin"] < BEGIN + 1 and spent["end"] < END + 1
    assert spent["training"] < 15, spent  # sixty answers of one second each would be sixty


@pytest.mark.slow
def test_a_server_without_permission_and_one_that_talks_nonsense_are_survived(tmp_path, monkeypatch):
    for behaviour in ("forbids", "garbage"):
        here = tmp_path / behaviour
        here.mkdir()
        with fake_wandb(behaviour) as server:
            _, said, folder = train_with(here, monkeypatch, server.url)
        assert_whole(folder)
        assert len(warned(said)) == 1, said


def test_a_continued_offline_run_is_written_anew_from_the_record(tmp_path, monkeypatch):
    import wandb

    given: list[tuple[dict[str, float], int]] = []
    folder = tiny_train(tmp_path, "name=a", "steps=4", "training.log_every=1", "logger=wandb")
    (torn,) = (folder / "wandb").glob("offline-run-*")
    cut_metrics(folder, 4)
    real = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log", lambda run, row, step: given.append((row, step)) or real(run, row, step=step)
    )
    tiny_train(tmp_path, "name=a", "steps=6", "training.log_every=1", "logger=wandb", resume=folder)
    (anew,) = (folder / "wandb").glob("offline-run-*")
    rows = read_metrics(folder)
    assert torn != anew and [step for _, step in given] == [row["step"] for row in rows]
    assert [row["train/loss"] for row, _ in given if "train/loss" in row] == [
        row["loss"] for row in rows if row["kind"] == "train"
    ]


def test_a_run_that_fails_is_marked_failed(tmp_path, monkeypatch):
    import wandb

    codes: list[int] = []
    real = wandb.sdk.wandb_run.Run.finish
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "finish", lambda run, exit_code: codes.append(exit_code) or real(run, exit_code)
    )
    monkeypatch.setattr("softattn_lm.training.samples.Samples.on_train_start", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_train(tmp_path, "name=a", "logger=wandb")
    monkeypatch.undo()
    assert codes == [1] and wandb.run is None
