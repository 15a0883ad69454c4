"""fork=<run>@<step>: a new run from a kept checkpoint of another, with other settings, and on its own feet."""

import json
import shutil

import pytest

from softattn_lm.commands import train
from softattn_lm.errors import UserError
from softattn_lm.runs.changes import forked_config
from softattn_lm.runs.config import read_config
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import load_run, read_checkpoint
from softattn_lm.training.fork import split
from tests.tiny_run import losses, text, tiny_config, tiny_train

SETTINGS = ("name=parent", "steps=6", "training.keep_steps=[2,4]", "training.log_every=1", "schedule=constant")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent")
    return folder, tiny_train(folder, *SETTINGS)


@pytest.fixture
def parent(made, tmp_path):
    """A folder with a run in it, its text and its checkpoints of steps 2, 4 and 6 (last, best)."""
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def fork(folder, *typed):
    """`softattn train ...`; the defaults are those of tests/tiny_run.py with another width, which must not get in."""
    train.run(tiny_config(folder, "model.d_model=32", *typed), [], list(typed))
    (name,) = [word.partition("=")[2] for word in typed if word.startswith("name=")]
    return folder / "runs" / name


def saved(run, name):
    return read_checkpoint(run / "checkpoints" / f"{name}.ckpt")


def test_a_fork_with_nothing_changed_is_the_run_it_comes_from(parent):
    run = fork(parent, "fork=parent@4", "name=child")
    whole = parent / "runs" / "parent"
    assert losses(run) == losses(whole)[4:] and next(row["step"] for row in read_metrics(run)) == 5
    for name, value in saved(run, "last")["state_dict"].items():
        assert value.equal(saved(whole, "last")["state_dict"][name]), name
    tokens = [row["tokens"] for row in read_metrics(run) if row["kind"] == "train"]
    assert tokens == [5 * 128, 6 * 128]


def test_other_settings_act_from_the_step_on_and_the_parent_is_recorded(parent):
    whole = parent / "runs" / "parent"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    run = fork(parent, "fork=parent@2", "lr=0.001", "steps=5", "training.accumulate=4", "model.dropout=0", "name=child")
    cfg = read_config(run)
    assert (cfg["lr"], cfg["optimizer"]["lr"], cfg["model"]["d_model"], cfg["steps"]) == (0.001, 0.001, 16, 5)
    assert cfg["model"]["dropout"] == cfg["attention"]["dropout"] == cfg["model"]["attention"]["dropout"] == 0
    assert cfg["fork"] == read_status(run)["parent"] == "parent@2"
    assert json.loads((run / "summary.json").read_text())["parent"] == "parent@2"
    rates = [row["lr"] for row in read_metrics(run) if row["kind"] == "train"]
    assert rates == [0.001] * 3 and read_status(run)["step"] == 5
    assert [row["step"] for row in read_metrics(run) if row["kind"] == "validation"] == [3, 5]
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    # It needs its parent no more.
    shutil.rmtree(whole)
    train.run(tiny_config(parent, "resume=child", "steps=7"), [], ["resume=child", "steps=7"])
    assert load_run(run).step == 7 and read_status(run)["parent"] == "parent@2"


def test_the_optimizer_goes_on_where_it_is_the_same_kind_and_begins_anew_where_it_is_not(parent):
    same = saved(fork(parent, "fork=parent@4", "steps=5", "optimizer.weight_decay=0.5", "name=same"), "last")
    other = saved(fork(parent, "fork=parent@4", "steps=5", "optimizer=adamw", "name=other"), "last")
    assert 0.5 in [group["weight_decay"] for group in same["optimizer_states"][0]["param_groups"]]
    moments = [state["step"] for state in same["optimizer_states"][0]["state"].values() if "step" in state]
    assert set(map(float, moments)) == {5.0}
    assert {float(state["step"]) for state in other["optimizer_states"][0]["state"].values()} == {1.0}
    assert read_config(parent / "runs" / "other")["lr"] == 1e-3  # what the choice of adamw sets


def test_last_and_best_are_steps_too(parent):
    assert split("a@12") == ("a", "12") and split("a") == ("a", "last") and split("a@best") == ("a", "best")
    run = fork(parent, "fork=parent", "steps=7", "name=child")
    assert read_config(run)["fork"] == "parent@6" and len(losses(run)) == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["fork=parent@3"], r"keeps no checkpoint of step 3; kept are 2, 4, 6 \(best\), 6 \(last\)"),
        (["fork=perent@2"], "did you mean parent"),
        (["fork=parent@soon"], "behind @ stands a step, last or best"),
        (["fork=parent@2", "model.d_model=64"], "model.d_model cannot change in a fork"),
        (["fork=parent@2", "position=alibi"], "position cannot change in a fork"),
        (["fork=parent@4", "steps=3"], "steps=3 is less than what run .* has done, 4 steps"),
        (["fork=parent"], "leaves a fork of step 6 nothing to do; give a larger budget, such as steps=12"),
        (["fork=parent@2", "resume=parent"], "give one of them"),
        (["fork=parent@2", "name=parent"], "name=parent is taken"),
    ],
)
def test_what_cannot_be_forked_is_one_line_and_leaves_nothing(parent, typed, said):
    with pytest.raises(UserError, match=said):
        train.run(tiny_config(parent, *typed), [], typed)
    assert sorted(path.name for path in (parent / "runs").iterdir()) == ["cache", "parent"]


def test_another_text_is_trained_on_if_its_tokens_are_the_same(parent):
    (parent / "more.txt").write_text(text(3000, seed=5), encoding="utf-8")
    (parent / "other.txt").write_text("XYZ " * 800, encoding="utf-8")
    run = fork(parent, "fork=parent@2", f"data.path={parent / 'more.txt'}", "name=child")
    assert load_run(run).data != load_run(parent / "runs" / "parent").data
    with pytest.raises(UserError, match="the tokenizer fitted on this text is another"):
        fork(parent, "fork=parent@2", f"data.path={parent / 'other.txt'}", "name=bad")


def test_a_fork_killed_before_its_first_step_is_continued(parent, monkeypatch):
    from softattn_lm.training import run as training

    class Killed(BaseException):
        pass

    def die(*given):
        raise Killed

    monkeypatch.setattr(training, "prepared_data", die)
    with pytest.raises(Killed):
        fork(parent, "fork=parent@4", "name=child")
    monkeypatch.undo()
    typed = ["resume=child"]
    train.run(tiny_config(parent, *typed), [], typed)
    assert losses(parent / "runs" / "child") == losses(parent / "runs" / "parent")[4:]


def test_settings_of_a_fork_are_the_parents_and_what_was_typed():
    saved = {"lr": 1.0, "optimizer": {"lr": 1.0, "eps": 1}, "model": {"dropout": 0.1}, "attention": {"dropout": 0.1}}
    composed = {"lr": 5.0, "optimizer": {"lr": 5.0}, "name": "n", "runs": "r", "fork": "a@1"}
    found = forked_config(saved, {"optimizer.eps": 2}, composed)
    assert found["optimizer"] == {"lr": 1.0, "eps": 2} and found["name"] == "n" and found["resume"] is None
    assert forked_config(saved, {"lr": 3.0}, composed)["optimizer"]["lr"] == 3.0
    assert forked_config(saved, {"optimizer": {"lr": 5.0}}, composed)["lr"] == 5.0
    assert saved["lr"] == 1.0
