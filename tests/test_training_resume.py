"""Interrupted and continued is, bit for bit, never interrupted; and checkpoints that can be trusted."""

import os
import signal

import pytest
import torch
from rich.console import Console

from softattn_lm.errors import UserError
from softattn_lm.runs.changes import resumed_config
from softattn_lm.runs.config import read_config
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.runs.status import read_status
from softattn_lm.training import interrupt, signals
from softattn_lm.training.checkpoint import load_run, plain, read_checkpoint, write_checkpoint
from softattn_lm.training.run import train
from tests.tiny_run import losses, tiny_config, tiny_train


class Stop(RuntimeError):
    """Stands for a process that dies."""


def weights(run, which="last"):
    return torch.load(run / "checkpoints" / f"{which}.ckpt", weights_only=True)


def equal(a, b):
    """Bitwise equality of nested plain containers, clocks apart."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a if key != "seconds")
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def die_after(step, monkeypatch):
    """The process dies in the middle of the accumulation window after `step` steps."""
    from softattn_lm.training.lit import LitGPT

    real = LitGPT.training_step

    def dying(self, batch, batch_idx):
        if batch_idx == step * self.accumulate + 1:
            raise Stop
        return real(self, batch, batch_idx)

    monkeypatch.setattr(LitGPT, "training_step", dying)
    return lambda: monkeypatch.setattr(LitGPT, "training_step", real)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch, optimizer, schedule):
    """Checkpoints after steps 2 and 4, one of them with a validation; whatever came after the last one is done
    again. Dropout is on; it dies within an accumulation window, and within a pass over the text: one has 2.6 steps.
    """
    # Every schedule and both optimizers meet either number of workers and either place to die.
    place = ["cosine", "linear", "wsd", "constant"].index(schedule) + (optimizer == "muon")
    workers, dies_after = 2 * (place % 2), 3 + 2 * (place // 2 % 2)
    overrides = [
        f"optimizer={optimizer}",
        f"schedule={schedule}",
        "schedule.warmup=2",
        "batch_size=128",
        f"training.num_workers={workers}",
        "training.accumulate=4",
        "training.save_every=2",
        "training.val_every=4",
        "steps=8",
        "training.log_every=1",
    ]
    whole = tiny_train(tmp_path, *overrides)
    cfg = tiny_config(tmp_path, *overrides)
    run = new_run(cfg["runs"], "killed", cfg)
    heal = die_after(dies_after, monkeypatch)
    with pytest.raises(Stop):
        train(cfg, run, console=Console(quiet=True))
    assert read_status(run) == {"state": "failed", "step": dies_after, "steps": 8, "error": "Stop:"}
    heal()
    train(cfg, run, resume=True, console=Console(quiet=True))
    assert losses(run) == losses(whole)
    for row, other in zip(read_metrics(run), read_metrics(whole), strict=True):
        assert row | {"seconds": 0} == other | {"seconds": 0}
    for name in ("state_dict", "optimizer_states", "loops", "global_step"):
        assert equal(weights(run)[name], weights(whole)[name]), name
    assert weights(run)["softattn"]["best"] == weights(whole)["softattn"]["best"]


def test_a_longer_budget_goes_on_as_if_it_had_been_given_at_once(tmp_path):
    whole = tiny_train(tmp_path, "steps=8", "schedule=constant", "training.val_every=2")
    run = tiny_train(tmp_path, "steps=4", "schedule=constant", "training.val_every=2", "name=short")
    cfg = resumed_config(read_config(run), {"steps": 8})
    train(cfg, run, resume=True, console=Console(quiet=True))
    assert losses(run) == losses(whole)
    assert equal(weights(run)["state_dict"], weights(whole)["state_dict"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("val_every", [100, 3])
def test_a_signal_finishes_the_step_saves_and_leaves(tmp_path, monkeypatch, number, val_every):
    whole = tiny_train(tmp_path, "steps=6", f"training.val_every={val_every}")
    cfg = tiny_config(tmp_path, "steps=6", f"training.val_every={val_every}")
    run = new_run(cfg["runs"], "signalled", cfg)
    from softattn_lm.training.lit import LitGPT

    real, before = LitGPT.training_step, signal.getsignal(number)

    def signalled(self, batch, batch_idx):
        if batch_idx == 4:  # the first half of the third step
            os.kill(os.getpid(), number)
        return real(self, batch, batch_idx)

    monkeypatch.setattr(LitGPT, "training_step", signalled)
    result = train(cfg, run, console=Console(quiet=True))
    monkeypatch.setattr(LitGPT, "training_step", real)
    assert (result["state"], result["step"], result["signal"]) == ("interrupted", 3, number)
    assert read_status(run)["state"] == "interrupted"
    assert signal.getsignal(number) == before
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "validation"] == []
    train(cfg, run, resume=True, console=Console(quiet=True))
    assert [row | {"seconds": 0} for row in read_metrics(run)] == [row | {"seconds": 0} for row in read_metrics(whole)]
    assert equal(weights(run)["state_dict"], weights(whole)["state_dict"])


def test_a_finished_run_says_so_and_does_nothing(tmp_path, capsys):
    run = tiny_train(tmp_path, "steps=2")
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file())
    summary = train(read_config(run), run, resume=True)
    assert "already at step 2 of 2" in " ".join(capsys.readouterr().out.split())
    assert summary["nothing_to_do"]
    assert before == sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file())


def test_a_budget_that_is_used_up_already_is_refused_with_both_numbers(tmp_path):
    run = tiny_train(tmp_path, "steps=4", "name=full")
    before = read_status(run), read_config(run)
    for budget, said in (({"steps": 3}, "steps=3"), ({"tokens": 200}, r"tokens=200 \(2 steps\)")):
        with pytest.raises(UserError, match=f"^{said} is less than what run .*full has done, 4 steps"):
            train(resumed_config(read_config(run), budget), run, resume=True, console=Console(quiet=True))
    assert (read_status(run), read_config(run)) == before


def test_samples_past_the_checkpoint_are_written_once(tmp_path, monkeypatch):
    overrides = ["training.sample_every=1", "training.save_every=2", "training.val_every=100", "steps=5"]
    whole = tiny_train(tmp_path, *overrides)
    cfg = tiny_config(tmp_path, *overrides)
    run = new_run(cfg["runs"], "killed", cfg)
    heal = die_after(3, monkeypatch)
    with pytest.raises(Stop):
        train(cfg, run, console=Console(quiet=True))
    assert (run / "samples.txt").read_text().count("--- step 3,") == 1
    heal()
    train(cfg, run, resume=True, console=Console(quiet=True))
    assert (run / "samples.txt").read_text() == (whole / "samples.txt").read_text()


def test_a_run_whose_text_has_changed_is_not_continued(tmp_path):
    run = tiny_train(tmp_path, "steps=2")
    (tmp_path / "text.txt").write_text("something else entirely, " * 300)
    with pytest.raises(UserError, match=r"text of run .* has changed"):
        train(resumed_config(read_config(run), {"steps": 4}), run, resume=True, console=Console(quiet=True))


def test_the_checkpoints_that_are_kept_are_the_steps_they_name(tmp_path):
    run = tiny_train(tmp_path, "steps=6", "training.keep_steps=log")
    kept = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert kept == ["best.ckpt", "last.ckpt", "step-00000001.ckpt", "step-00000002.ckpt", "step-00000004.ckpt"]
    run = tiny_train(tmp_path, "steps=6", "training.keep_steps=[0,3,5]")
    for step in (0, 3, 5):
        saved = weights(run, f"step-{step:08d}")
        assert saved["global_step"] == saved["softattn"]["step"] == step
    assert not torch.equal(*(weights(run, f"step-0000000{n}")["state_dict"]["model.embed.weight"] for n in (0, 3)))


def test_best_is_the_validated_step_with_the_lowest_loss(tmp_path):
    # A rate so large that the loss rises again.
    run = tiny_train(tmp_path, "steps=6", "training.val_every=1", "optimizer=adamw", "lr=3", "schedule=constant")
    rows = [row for row in read_metrics(run) if row["kind"] == "validation"]
    best = min(rows, key=lambda row: row["loss"])
    assert best["step"] < 6
    assert load_run(run, "best").step == best["step"]
    assert load_run(run, "best").metrics["loss"] == best["loss"]
    assert load_run(run).step == 6


def test_a_loaded_run_needs_no_config_and_no_text(tmp_path):
    run = tiny_train(tmp_path, "steps=2")
    (run / "config.yaml").unlink()
    (tmp_path / "text.txt").unlink()
    loaded = load_run(run)
    assert not loaded.model.training
    ids = loaded.tokenizer.encode("abc")
    assert loaded.tokenizer.decode(ids) == "abc"
    assert loaded.model(torch.from_numpy(ids.astype("int64"))[None]).shape == (1, 3, loaded.tokenizer.vocab_size)
    assert loaded.config["model"]["d_model"] == 16


def test_no_temporary_file_is_left_and_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint({"softattn": {"format": 1}, "state_dict": {}, "x": torch.ones(2)}, path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"checkpoint\.x"):
        write_checkpoint({"softattn": {"format": 1}, "state_dict": {}, "x": object()}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_only_plain_containers_pass():
    import collections

    import numpy as np

    value = collections.OrderedDict(a=np.float64(0.1), b=(1, True, None, "s"), c={2: torch.ones(1)})
    flat = plain(value)
    assert type(flat) is dict and type(flat["a"]) is float and flat["a"] == 0.1
    assert flat["b"] == [1, True, None, "s"] and type(flat["b"][1]) is bool
    for bad in ({1, 2}, np.zeros(2), {(1, 2): 3}, lambda: 0, torch.float32):
        with pytest.raises(TypeError):
            plain({"deep": [bad]})


def test_a_file_that_is_no_checkpoint_of_ours_is_refused_in_one_sentence(tmp_path):
    run = tiny_train(tmp_path, "steps=2")
    good = (run / "checkpoints" / "last.ckpt").read_bytes()
    path = tmp_path / "x.ckpt"

    def refused(match):
        with pytest.raises(UserError, match=match) as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value)

    refused("no checkpoint")
    for cut in (0, 10, len(good) // 2, len(good) - 10):
        path.write_bytes(good[:cut])
        refused("cannot be read as a checkpoint|more than plain data")
    path.write_text("hello")
    refused("cannot be read|more than plain data")
    torch.save({"state_dict": {}}, path)
    refused("no entry 'softattn'")
    torch.save({"state_dict": {}, "softattn": {"format": 99}}, path)
    refused("format 99")
    torch.save({"state_dict": {}, "softattn": {"format": 1}, "run": print}, path)
    refused("more than plain data")
    with pytest.raises(UserError, match="there are best, last"):
        load_run(run, "step-00000007")


def test_a_stranger_cannot_name_what_is_built(tmp_path):
    run = tiny_train(tmp_path, "steps=2")
    path = run / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    saved["softattn"]["config"]["model"]["attention"]["_target_"] = "os.system"
    torch.save(saved, path)
    with pytest.raises(UserError):
        load_run(run)


def test_loading_a_run_needs_no_lightning(tmp_path):
    import subprocess
    import sys

    run = tiny_train(tmp_path, "steps=2")
    program = (
        "import sys, pathlib; from softattn_lm.training.checkpoint import load_run; "
        "load_run(pathlib.Path(sys.argv[1])); "
        "sys.exit('lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(run)], check=False).returncode == 0


def test_the_second_signal_ends_the_process_as_always():
    class Nothing:
        global_step = 0

    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    with signals.signals_end_the_run():
        interrupt.Interrupt(None, lambda: False).on_train_start(Nothing(), None)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in before} == before
