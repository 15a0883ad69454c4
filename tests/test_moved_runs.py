"""A run folder does not know where it is: moved and renamed it is still sampled, measured and continued."""

import pytest

from softattn_lm.commands import evaluate, sample, train
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import load_run
from tests.tiny_run import losses, tiny_config, tiny_train


def composed(command, settings, *overrides):
    return check(compose(command, list(overrides), config_folder()), settings)


@pytest.fixture
def moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    run = tiny_train(tmp_path / "here", "name=old", "steps=4", "schedule=constant", "logger=csv")
    whole = tiny_train(tmp_path / "here", "name=whole", "steps=6", "schedule=constant")
    place = tmp_path / "there" / "new-name"
    run.rename(place)
    return place, whole


def test_no_file_of_it_names_its_folder(moved):
    place, _ = moved
    for file in place.rglob("*"):
        if file.is_file() and file.name != "config.yaml":  # which repeats what was typed, runs= among it
            assert b"runs/old" not in file.read_bytes(), file


def test_it_is_sampled_and_measured(moved, tmp_path, capsys):
    place, _ = moved
    sample.run(composed("sample", "SampleSettings", "device=cpu", "max_new_tokens=5"), [str(place)], "ab")
    assert capsys.readouterr().out.startswith("ab")
    evaluate.run(composed("evaluate", "EvaluateSettings", f"runs={tmp_path / 'there'}", "device=cpu"), ["new-name"])
    row = [row for row in read_metrics(place) if row["kind"] == "validation"][-1]
    assert f"{row['loss']:.4f}" in capsys.readouterr().out


def test_it_is_continued_in_its_new_place_and_nothing_appears_in_the_old_one(moved, tmp_path):
    place, whole = moved
    left = sorted(path for path in (tmp_path / "here").rglob("*"))
    typed = ["resume=new-name", "steps=6", f"runs={tmp_path / 'there'}"]
    cfg = tiny_config(tmp_path / "here", *typed)
    train.run(cfg, [], typed)
    assert losses(place) == losses(whole) and read_status(place)["state"] == "finished"
    for name, value in load_run(place).model.state_dict().items():
        assert value.equal(load_run(whole).model.state_dict()[name])
    assert left == sorted(path for path in (tmp_path / "here").rglob("*"))
