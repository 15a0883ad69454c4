"""metrics.jsonl is the record: no row lost or doubled, whatever kills the run; csv and wandb are written from it."""

import csv
import io
import json
import signal

import pytest
from rich.console import Console

from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.runs.status import read_status
from softattn_lm.training import metrics
from softattn_lm.training.continued import missing_rows
from softattn_lm.training.run import train
from tests import sabotage
from tests.tiny_run import losses, tiny_config, tiny_train
from tests.wandb_files import exit_code, history, run_id
from tests.warm import Child, tiny_words

SETTINGS = ("steps=8", "training.val_every=4", "training.log_every=1")


def rows(run):
    return [{**row, "seconds": 0} for row in read_metrics(run)]


def test_killed_with_half_a_row_written_every_step_is_there_once(tmp_path):
    whole = tiny_train(tmp_path, *SETTINGS)
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.save_every=2", "logger=csv")
    child = Child(tmp_path, *words, sabotage=sabotage.die_within_row, arguments=(7,))
    assert child.wait() == 128 + signal.SIGKILL
    assert not (run / "metrics.jsonl").read_text().endswith("\n")  # torn
    (run / "metrics.csv").write_text("kind,step\ntrain,1\ntra")  # as an older program may have left it
    assert Child(tmp_path, "resume=a").wait() == 0
    assert rows(run) == rows(whole)
    with (run / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    found = [row for row in read_metrics(run) if row["kind"] != "telemetry"]
    assert [(row["kind"], int(row["step"]), float(row["loss"])) for row in table] == [
        (row["kind"], row["step"], row["loss"]) for row in found
    ]


def test_rows_of_a_run_that_raises_are_told_though_nobody_asked_for_them_yet(tmp_path, monkeypatch):
    """Between two writes, of which there is one every `log_every` steps."""
    sabotage_at = 9

    def dying(self, batch, batch_idx, real=metrics.LitGPT.training_step):
        if batch_idx == sabotage_at:
            raise ZeroDivisionError
        return real(self, batch, batch_idx)

    monkeypatch.setattr(metrics.LitGPT, "training_step", dying)
    cfg = tiny_config(tmp_path, "steps=8", "training.log_every=100", "training.val_every=100")
    run = new_run(cfg["runs"], "a", cfg)
    with pytest.raises(ZeroDivisionError):
        train(cfg, run, console=Console(quiet=True))
    assert len(losses(run)) == 4


@pytest.mark.slow
def test_a_killed_offline_run_is_made_anew_with_every_step_once_and_in_order(tmp_path):
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.save_every=2", "logger=wandb")
    child = Child(tmp_path, *words, sabotage=sabotage.slow_steps, arguments=(0.05,))
    child.when(lambda: len(losses(run)) >= 5)
    child.signal(signal.SIGKILL, group=True)
    assert child.wait() == 128 + signal.SIGKILL
    assert exit_code(run) is None
    name = (run / "wandb" / "id").read_text()
    assert Child(tmp_path, "resume=a").wait() == 0
    found = history(run)
    assert [row["_step"] for row in found] == sorted({row["_step"] for row in found})
    assert [row["train/loss"] for row in found if "train/loss" in row] == losses(run) and len(losses(run)) == 8
    validations = [row["loss"] for row in read_metrics(run) if row["kind"] == "validation"]
    assert [row["validation/loss"] for row in found if "validation/loss" in row] == validations
    assert (exit_code(run), run_id(run)) == (0, name)


def test_a_failed_run_is_marked_failed_in_its_offline_run(tmp_path, monkeypatch):
    sabotage_step = metrics.LitGPT.training_step
    monkeypatch.setattr(metrics.LitGPT, "training_step", lambda *given: sabotage_step(*given) * float("nan"))
    cfg = tiny_config(tmp_path, "logger=wandb")
    run = new_run(cfg["runs"], "a", cfg)
    with pytest.raises(UserError, match="no longer finite"):
        train(cfg, run, console=Console(quiet=True))
    assert exit_code(run) == 1 and read_status(run)["state"] == "failed"


def test_what_a_run_without_a_checkpoint_wrote_is_not_doubled(tmp_path):
    """It begins again at step 0, whose telemetry is written before the first step."""
    whole = tiny_train(tmp_path, *SETTINGS)
    run = tmp_path / "runs" / "a"
    child = Child(
        tmp_path, *tiny_words(tmp_path, "name=a", *SETTINGS), sabotage=sabotage.die_within_row, arguments=(2,)
    )
    assert child.wait() == 128 + signal.SIGKILL
    assert read_metrics(run) and not (run / "checkpoints").exists()
    train(read_config(run), run, resume=True, console=Console(quiet=True))
    assert rows(run) == rows(whole)


def test_killed_between_a_checkpoint_and_the_next_thing_no_sample_is_lost_or_doubled(tmp_path):
    settings = (*SETTINGS, "training.save_every=2", "training.sample_every=2")
    whole = tiny_train(tmp_path, *settings)
    for step in (2, 8):
        run = tmp_path / "runs" / f"a{step}"
        words = tiny_words(tmp_path, f"name=a{step}", *settings)
        child = Child(tmp_path, *words, sabotage=sabotage.die_behind_save, arguments=(step,))
        assert child.wait() == 128 + signal.SIGKILL
        train(read_config(run), run, resume=True, console=Console(quiet=True))
        assert (run / "samples.txt").read_text() == (whole / "samples.txt").read_text()


def test_killed_in_its_last_sample_a_run_is_finished_with_sample_and_summary_whole(tmp_path):
    whole, run = tiny_train(tmp_path, *SETTINGS), tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS)
    assert Child(tmp_path, *words, sabotage=sabotage.die_in_last_sample).wait() == 128 + signal.SIGKILL
    child = Child(tmp_path, "resume=a")
    assert child.wait() == 0 and "already at step 8 of 8" in child.said
    assert (run / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    found, wanted = (json.loads((folder / "summary.json").read_text()) for folder in (run, whole))
    assert found.keys() == wanted.keys() and read_status(run)["state"] == "finished"
    for key in ("opening", "attention", "tokens", "fingerprint"):
        assert found[key] == wanted[key]
    assert found["tokens_per_second"] > 0


def test_rows_that_are_gone_are_said_and_the_run_goes_on(tmp_path):
    run = tiny_train(tmp_path, *SETTINGS, "name=a")
    file = run / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= 5]
    for rows_left, said in (
        ("".join(kept), "no rows of 3 of the steps that were done, the first of which is 6"),
        ("", "of 9"),
    ):
        file.write_text(rows_left)
        console = Console(record=True, quiet=False, file=io.StringIO(), width=2000)
        steps = 9 if rows_left else 10
        train(read_config(run) | {"steps": steps}, run, resume=True, console=console)
        assert said in console.export_text()
        assert read_status(run)["state"] == "finished" and len(losses(run)) == (6 if rows_left else 1)


def test_a_fork_and_a_whole_record_lack_nothing(tmp_path):
    run = tiny_train(tmp_path, *SETTINGS, "name=a")
    fork = tiny_train(tmp_path, *SETTINGS, "name=b", "fork=a@8", "steps=10")
    for folder, step, parent in ((run, 8, None), (fork, 10, "a@8")):
        assert missing_rows(folder, step, parent) is None
    assert "of 8 of the steps" in missing_rows(fork, 10, None)


def test_a_validation_set_that_has_changed_stops_a_run_from_being_continued(tmp_path):
    """Its losses would be of two texts, in one curve."""
    other = tmp_path / "other.txt"
    other.write_text("abc def " * 100)
    run = tiny_train(tmp_path, *SETTINGS, "name=a", f"+data.validation_sets.other={other}")
    other.write_text("fed cba " * 100)
    with pytest.raises(UserError, match=r"the validation set other of run .* has changed"):
        train(read_config(run) | {"steps": 9}, run, resume=True, console=Console(quiet=True))
    other.write_text("abc def " * 100)
    train(read_config(run) | {"steps": 9}, run, resume=True, console=Console(quiet=True))
    assert read_status(run)["step"] == 9


def test_a_damaged_summary_of_a_finished_run_is_written_anew(tmp_path):
    run = tiny_train(tmp_path, *SETTINGS, "name=a")
    for damaged in ("{", "[]", '{"step": "8"}'):
        (run / "summary.json").write_text(damaged)
        train(read_config(run), run, resume=True, console=Console(quiet=True))
        assert json.loads((run / "summary.json").read_text())["step"] == 8
