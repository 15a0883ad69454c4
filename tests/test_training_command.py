"""The commands train and evaluate around the training room."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from softattn_lm.commands import evaluate, train
from softattn_lm.config.raw import encode
from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config
from softattn_lm.runs.find import find_run
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import load_run
from softattn_lm.training.summary import prompt
from softattn_lm.training.tracking import is_logged_in
from tests.tiny_run import text, tiny_config, tiny_train


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`softattn train ...` in a process of its own, in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "softattn_lm", "train", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_run_is_continued_with_what_was_typed_and_nothing_else(tmp_path):
    run = tiny_train(tmp_path, "name=a", "seed=5")
    # What a default is now must not reach a run that was started with something else.
    typed = ["resume=a", "steps=8"]
    cfg = tiny_config(tmp_path, *typed)
    train.run(cfg, [], typed)
    saved = read_config(run)
    assert (saved["steps"], saved["seed"], saved["training"]) == (8, 5, load_run(run).config["training"])
    assert read_status(run)["step"] == 8
    typed = ["resume=a", "steps=9", "trainer=gpu"]
    with pytest.raises(UserError, match="no CUDA device"):
        train.run(tiny_config(tmp_path, *typed), [], typed)
    assert read_status(run)["state"] == "finished" and read_config(run) == saved  # the attempt left nothing behind
    for wrong in ("lr=3", "optimizer=adamw", "experiment=nanogpt_cpu", "model.dropout=0.5"):
        typed = ["resume=a", wrong]
        with pytest.raises(UserError, match="cannot change when a run is continued"):
            train.run(tiny_config(tmp_path, *typed), [], typed)
    assert read_config(run) == saved


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("optimizer.beta1=1.5", "optimizer.beta1=1.5"),
        ("data.val_fraction=0.0001", "nothing to predict"),
        ("tokens=5", "tokens=5 is 5 tokens"),
    ],
)
def test_a_run_that_is_refused_says_one_line_and_leaves_no_folder(tmp_path, capsys, wrong, said):
    tiny_train(tmp_path, "name=ok")
    capsys.readouterr()
    for typed in ([wrong], [wrong, "name=bad"], [wrong, "logger=csv"]):
        with pytest.raises(UserError, match=said):
            train.run(tiny_config(tmp_path, *typed), [], typed)
    assert capsys.readouterr().out == ""
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["cache", "ok"]


def test_the_last_words_can_be_pasted_whatever_the_folder_is_called(tmp_path, capsys, monkeypatch):
    odd = tmp_path / "r F, [x] :b:"
    cfg = tiny_config(tmp_path, f"runs={encode(str(odd))}", "name=sp")
    monkeypatch.setattr(train, "FOLDER", "ANOTHER_NAME")
    train.run(cfg, [], ["name=sp"])
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "resume=" in line]
    assert shlex.split(line)[-2] == f"resume={odd}/sp"
    (line,) = [line for line in shown.splitlines() if "softattn sample" in line]
    written = shlex.split(line)
    assert written[-1] == f"{odd}/sp" and written[-2] in (tmp_path / "text.txt").read_text()
    assert f"run {odd}/sp: " in shown


@pytest.mark.parametrize(
    ("opening", "said"),
    [
        ("n on the way, she", "on the"),
        ("ed\n'It's late", "late"),
        ("late. Emma", "Emma"),
        ("abc", "abc"),
        ("?!", "?"),
    ],
)
def test_a_suggested_prompt_is_made_of_whole_words_of_the_text(opening, said):
    assert prompt(opening) == said


def test_processes_started_from_outside_need_one_name_and_the_first_makes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="name=my-run"):
        train.run(tiny_config(tmp_path), [], [])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(train, "WAIT", 0.2)
    with pytest.raises(UserError, match="made no run folder"):
        train.run(tiny_config(tmp_path, "name=shared"), [], [])
    assert not (tmp_path / "runs" / "shared").exists()


def test_describing_prints_sizes_and_makes_no_run(tmp_path, capsys):
    train.run(tiny_config(tmp_path, "describe=true"), [], ["describe=true"])
    sizes = json.loads(capsys.readouterr().out)
    assert sizes["steps"] == 6 and sizes["tokens_per_step"] == 128
    with pytest.raises(UserError, match="there is no run"):
        find_run(None, tmp_path / "runs")


def evaluation(folder: Path, **changes: object) -> dict:
    settings = {
        "runs": str(folder / "runs"),
        "checkpoint": "last",
        "text": None,
        "file": None,
        "split": "validation",
        "batch_size": 4,
        "by_position": False,
        "device": "cpu",
    }
    return settings | changes


def test_evaluation_gives_the_loss_that_training_ended_with(tmp_path, capsys):
    run = tiny_train(tmp_path, "name=a", "data.test_fraction=0.1")
    evaluate.run(evaluation(tmp_path), [])
    found = json.loads((run / "evaluation-validation.json").read_text())
    row = [row for row in read_metrics(run) if row["kind"] == "validation"][-1]
    for key, other in (("nats_per_token", "loss"), ("standard_error", "loss_se"), ("bits_per_byte", "bits_per_byte")):
        assert found[key] == pytest.approx(row[other], rel=1e-5)
    assert found["tokens"] == row["tokens"] and len(found["by_position"]) == 16
    assert f"{row['loss']:.4f} ± {row['loss_se']:.4f}" in capsys.readouterr().out
    evaluate.run(evaluation(tmp_path, split="test"), ["a"])
    assert json.loads((run / "evaluation-test.json").read_text())["nats_per_token"] != found["nats_per_token"]


def test_several_runs_stand_in_one_table_and_a_file_is_read_in_the_tokens_of_each(tmp_path, capsys):
    tiny_train(tmp_path, "name=chars")
    run = tiny_train(tmp_path, "name=bytes", "tokenizer=byte")
    (tmp_path / "it's, a text.txt").write_text(text(400, seed=3))
    evaluate.run(evaluation(tmp_path, file=str(tmp_path / "it's, a text.txt")), ["chars", "bytes"])
    shown = capsys.readouterr().out
    assert shown.count("nats per token ") == 1 and "chars" in shown and "compare bits per byte" in shown
    found = json.loads((run / "evaluation-file.json").read_text())
    assert found["tokens"] == 399
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] / 0.6931471805599453)


def test_evaluation_refuses_what_it_cannot_measure(tmp_path):
    tiny_train(tmp_path, "name=a")
    for changes, said in (
        ({"split": "test"}, "split=test .* is empty"),
        ({"text": "ab", "file": "x"}, "give one of them"),
        ({"text": "a"}, "text= has 1 token and needs 2"),
        ({"text": ""}, "text= has 0 tokens and needs 2"),
        ({"checkpoint": "step-1"}, "there are best, last"),
        ({"device": "tpu"}, "device=tpu"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate.run(evaluation(tmp_path, **changes), ["a"])
    (tmp_path / "text.txt").write_text("another text " * 300)
    with pytest.raises(UserError, match="has changed since"):
        evaluate.run(evaluation(tmp_path), ["a"])


def test_evaluating_needs_no_lightning(tmp_path):
    tiny_train(tmp_path, "name=a")
    program = (
        "import sys, json; from softattn_lm.commands import evaluate; evaluate.run(json.loads(sys.argv[1]), []); "
        "sys.exit('lightning' in sys.modules)"
    )
    words = [sys.executable, "-c", program, json.dumps(evaluation(tmp_path))]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 0


def test_wandb_gets_one_offline_run_with_the_nested_config_also_when_continued(tmp_path, monkeypatch):
    import wandb

    given, real = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **settings: given.append(settings) or real(**settings))
    run = tiny_train(tmp_path, "name=a", "logger=wandb", "logger.group=g")
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert (given[0]["mode"], given[0]["group"], given[0]["name"]) == ("offline", "g", "a")
    assert given[0]["config"]["model"]["d_model"] == 16
    typed = ["resume=a", "steps=7"]
    train.run(tiny_config(tmp_path, *typed), [], typed)
    assert given[1]["id"] == (run / "wandb" / "id").read_text()
    assert wandb.run is None


def test_wandb_goes_online_only_with_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not is_logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert is_logged_in()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not is_logged_in()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert is_logged_in()
