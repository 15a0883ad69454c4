"""wandb that refuses, never answers, fails in the middle or is slow: the run goes on at its speed, and says so once."""

import json
import os
import re
import shutil
import time
import warnings
from pathlib import Path

import pytest
from wandb.sdk import wandb_setup

from softattn_lm.config.settings import LoggerSettings
from softattn_lm.errors import UserError
from softattn_lm.runs.metrics import cut_metrics, read_metrics
from softattn_lm.training.tracking import ANSWER, BEGIN, END, finish_loggers, make_loggers, replayed
from tests.fake_wandb import deaf_server, fake_wandb, refusing_url, timed
from tests.tiny_run import tiny_config, tiny_train
from tests.warm import Child, tiny_words

STEPS = 60
LOAD = 6.0  # seconds that a busy machine may add


def train_with(tmp_path: Path, url: str) -> tuple[dict[str, float], list[str], Path]:
    """(seconds of wandb and of all, what was said about wandb, run folder) of a run in a process of its own."""
    words = tiny_words(tmp_path, f"steps={STEPS}", "training.log_every=1", "training.val_every=30", "logger=wandb")
    online = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "x" * 40, "WANDB_MODE": "online"}
    began = time.perf_counter()
    child = Child(tmp_path, *words, "name=a", sabotage=timed, arguments=(tmp_path / "spent",), environment=online)
    assert child.wait(100) == 0, child.said
    spent = json.loads((tmp_path / "spent").read_text()) | {"all": time.perf_counter() - began}
    folder = tmp_path / "runs" / "a"
    said = [line for line in child.said.splitlines() if line.startswith("warning: wandb")]
    # The time of the rows says how long training took, whatever the machine did before.
    trained = [row["seconds"] for row in read_metrics(folder) if row["kind"] == "train"]
    return spent | {"training": trained[-1]}, said, folder


def assert_whole(folder: Path) -> None:
    """Every step and every validation is in the record once, and the run is finished."""
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [30, 60]
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_a_server_that_takes_everything_gets_every_step_and_nothing_is_said(tmp_path):
    with fake_wandb("well") as server:
        _, said, folder = train_with(tmp_path, server.url)
    assert_whole(folder)
    assert sorted(set(server.steps)) == list(range(STEPS + 1)) and server.exit_codes == [0] and said == []


def test_a_server_that_refuses_is_replaced_by_the_disk(tmp_path):
    url = refusing_url()
    spent, said, folder = train_with(tmp_path, url)
    assert_whole(folder)
    (line,) = said
    assert url in line and "refused" in line and "wandb sync" in line
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    assert spent["begin"] < 2 + LOAD and spent["end"] < 1 + LOAD


def test_a_server_that_never_answers_costs_a_few_seconds_at_the_start(tmp_path):
    with deaf_server() as url:
        spent, said, folder = train_with(tmp_path, url)
    assert_whole(folder)
    (line,) = said
    assert "timed out" in line and "wandb sync" in line
    assert ANSWER <= spent["begin"] < ANSWER + 2 + LOAD and spent["end"] < 1 + LOAD


@pytest.mark.parametrize("behaviour", ["errors", "hangs"])
def test_a_server_that_fails_after_twenty_rows_does_not_hold_the_run_up(tmp_path, behaviour):
    with fake_wandb(behaviour) as server:
        spent, said, folder = train_with(tmp_path, server.url)
    assert_whole(folder)
    (line,) = said
    assert "metrics.jsonl has" in line and "wandb sync runs/a/wandb/run-" in line
    assert len(server.steps) > server.patience
    assert spent["begin"] < BEGIN and END <= spent["end"] < END + LOAD
    assert spent["all"] - sum(spent[part] for part in ("begin", "training", "end")) < 8 + LOAD, spent


def test_a_slow_server_is_slow_for_itself(tmp_path):
    with fake_wandb("slow") as server:
        spent, _, folder = train_with(tmp_path, server.url)
    assert_whole(folder)
    assert spent["begin"] < BEGIN + LOAD and spent["end"] < END + LOAD
    assert spent["training"] < 15, spent  # sixty answers of one second each would be sixty


def test_a_server_without_permission_and_one_that_talks_nonsense_are_survived(tmp_path):
    for behaviour in ("forbids", "garbage"):
        here = tmp_path / behaviour
        here.mkdir()
        with fake_wandb(behaviour) as server:
            _, said, folder = train_with(here, server.url)
        assert_whole(folder)
        assert len(said) == 1, said


def test_a_continued_offline_run_is_written_anew_from_the_record(tmp_path, monkeypatch):
    import wandb

    given: list[tuple[dict[str, float], int]] = []
    folder = tiny_train(tmp_path, "name=a", "steps=4", "training.log_every=1", "logger=wandb")
    (torn,) = (folder / "wandb").glob("offline-run-*")
    (torn / "mark").touch()  # within one second both would have the same name
    cut_metrics(folder, 4)
    real = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log", lambda run, row, step: given.append((row, step)) or real(run, row, step=step)
    )
    tiny_train(tmp_path, "name=a", "steps=6", "training.log_every=1", "logger=wandb", resume=folder)
    (anew,) = (folder / "wandb").glob("offline-run-*")
    assert not (anew / "mark").exists() and given == list(replayed(read_metrics(folder)))
    assert [step for row, step in given if "train/loss" in row] == [1, 2, 3, 4, 5, 6]


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


def test_a_run_begins_although_the_service_of_an_earlier_one_in_this_process_has_died(tmp_path):
    """wandb-core outlives a run of its process; killed between two runs, it ended the second with an exception."""
    first = make_loggers(LoggerSettings("wandb", project="p"), tmp_path, {})
    finish_loggers(first)
    core = wandb_setup.singleton().ensure_service()._proc._process
    core.kill()
    core.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = make_loggers(LoggerSettings("wandb", project="p"), tmp_path, {})
        second[0].log_metrics({"train/loss": 1.0}, 1)
        finish_loggers(second)
    assert second[0].run is not None and second[0].fault is None


def test_processes_that_a_run_starts_have_a_wandb_service_of_their_own(tmp_path):
    loggers = make_loggers(LoggerSettings("wandb", project="p"), tmp_path, {})
    assert loggers[0].run is not None and "WANDB_SERVICE" not in os.environ
    finish_loggers(loggers)


KEY = "a" * 40
# what is in the environment, and what is said of it; None: nothing, as wandb is not asked to go online
ENVIRONMENTS = {
    "a mode that is none": ({"WANDB_MODE": "bogus"}, "bogus|mode"),
    "no address": ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "not a url"}, "'not a url' is no http"),
    "a file as address": ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "file:///etc/passwd"}, "is no http"),
    "half an address": ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://[::1"}, "Invalid IPv6 URL"),
    "half an address, no key": ({"WANDB_BASE_URL": "http://[::1"}, "base_url|IPv6"),
    "a port that is none": ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:99999"}, "port|0-65535|refused"),
    "an id that is none": ({"WANDB_MODE": "offline", "WANDB_RUN_ID": "bad/id: x"}, "Run ID cannot contain"),
    "a .netrc of other bytes": ({"NETRC": "{folder}/netrc"}, None),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_an_environment_that_wandb_does_not_take_is_one_warning_and_the_run_goes_to_disk(
    case, tmp_path, monkeypatch, recwarn
):
    import wandb

    wandb.teardown()  # it reads the environment once a process
    values, said = ENVIRONMENTS[case]
    (tmp_path / "netrc").write_bytes(b"\xff\xfe junk")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in values.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    loggers = make_loggers(LoggerSettings("wandb", project="p"), tmp_path, {})
    finish_loggers(loggers)
    wandb.teardown()
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert (tmp_path / "wandb" / "id").read_text() == loggers[0].version
    lines = [str(warning.message) for warning in recwarn]
    assert (lines == []) if said is None else (len(lines) == 1 and re.search(said, lines[0])), lines
    assert all(os.environ[name] == value.format(folder=tmp_path) for name, value in values.items())


def no_folder(place):
    shutil.rmtree(place)
    place.write_text("a file")


def no_id(place, content=None):
    (place / "id").unlink()
    (place / "id").mkdir() if content is None else (place / "id").write_bytes(content)


def link(place):
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (place / "offline-run-1-x").symlink_to(elsewhere)


DAMAGED = {
    "wandb is a file": (no_folder, "wandb takes nothing of this run .*metrics.jsonl has its rows"),
    "the id is a folder": (no_id, "wandb will show a new run when this one is continued"),
    "the id is junk": (lambda place: no_id(place, b"\xff\x00/../.."), None),
    "the id leads outside": (lambda place: no_id(place, b"../../../x"), None),
    "the id is empty": (lambda place: no_id(place, b""), None),
    "a link among the runs": (link, None),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_wandb_folder_does_not_keep_a_run_from_going_on(case, tmp_path, monkeypatch, recwarn):
    damage, said = DAMAGED[case]
    monkeypatch.setenv("WANDB_MODE", "offline")
    finish_loggers(make_loggers(LoggerSettings("wandb", project="p"), tmp_path, {}))
    damage(tmp_path / "wandb")
    loggers = make_loggers(LoggerSettings("wandb", project="p"), tmp_path, {})
    loggers[0].log_metrics({"train/loss": 1.0}, 1)
    finish_loggers(loggers)
    lines = [str(warning.message) for warning in recwarn]
    assert (lines == []) if said is None else (len(lines) == 1 and re.search(said, lines[0])), lines
    assert case != "a link among the runs" or (tmp_path / "elsewhere" / "precious").exists()


@pytest.mark.parametrize("typed", ["project=a/b", f"project={'p' * 129}", f"tags=[{'t' * 65}]", "tags=['']"])
def test_a_name_that_wandb_does_not_take_is_refused_before_anything_begins(typed, tmp_path):
    with pytest.raises(UserError, match=f"^logger.{typed.partition('=')[0]}=.*must be .*characters"):
        tiny_config(tmp_path, "logger=wandb", f"logger.{typed}")
