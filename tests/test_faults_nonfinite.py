"""A loss or a gradient that is not a finite number stops the run where it arose, or costs that step and no more."""

import pytest
import torch
from rich.console import Console

from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import read_checkpoint
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.run import train
from tests import sabotage
from tests.tiny_run import losses, tiny_config

# Two micro-batches a step: 6 is the first half of step 4, 9 the second half of step 5.
SETTINGS = ("steps=6", "training.val_every=3", "training.log_every=4", "training.save_every=1")


@pytest.fixture
def bad(monkeypatch):
    """Calls tests/sabotage.py in this process, and undoes it."""
    for name in ("training_step", "optimizer_step"):
        monkeypatch.setattr(LitGPT, name, getattr(LitGPT, name))
    return sabotage.bad_micro_batch


def start(folder, *overrides):
    cfg = tiny_config(folder, *SETTINGS, *overrides)
    run = new_run(cfg["runs"], "a", cfg)
    train(cfg, run, console=Console(quiet=True))
    return run


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("forward", r"training loss is no longer finite at step 4, first in blocks\.1\.mlp; try a smaller lr"),
        ("backward", r"training gradient is no longer finite at step 4, first at the output of blocks\.1\.mlp"),
    ],
)
def test_the_run_stops_with_the_step_and_the_layer_and_what_is_saved_is_the_step_before(tmp_path, bad, where, said):
    bad([6], layer=1, where=where)
    with pytest.raises(UserError, match=said):
        start(tmp_path)
    run = tmp_path / "runs" / "a"
    saved = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert saved["global_step"] == 3
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert len(losses(run)) == 3 and None not in losses(run)
    assert read_status(run)["state"] == "failed" and "blocks.1.mlp" in read_status(run)["error"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_step_leaves_weights_and_optimizer_bit_for_bit_as_they_were(tmp_path, bad, optimizer):
    bad([6], layer=1)
    run = start(tmp_path, f"optimizer={optimizer}", "training.nonfinite=skip", "training.keep_steps=[3,4,5]")
    three, four, five = (read_checkpoint(run / "checkpoints" / f"step-0000000{n}.ckpt") for n in (3, 4, 5))
    assert [row["loss"] is None for row in read_metrics(run) if row["kind"] == "train"] == [n == 4 for n in range(1, 7)]
    for name, value in three["state_dict"].items():
        assert value.equal(four["state_dict"][name]), name
    before, after = (saved["optimizer_states"][0]["state"] for saved in (three, four))
    assert before.keys() == after.keys()
    for index, state in before.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[index][key])), (index, key)
    assert any(not value.equal(five["state_dict"][name]) for name, value in four["state_dict"].items())
    assert four["softattn"]["skipped"] == five["softattn"]["skipped"] == 1


def test_the_number_of_skipped_steps_is_that_of_the_whole_run(tmp_path, bad):
    bad([6, 9], layer=0)
    skipping = ("training.nonfinite=skip", "training.max_skipped=1")
    with pytest.raises(UserError, match=r"at step 5, first in blocks\.0\.mlp.*max_skipped=1 such steps have been left"):
        start(tmp_path, *skipping)
    run = tmp_path / "runs" / "a"
    cfg = read_config(run)
    with pytest.raises(UserError, match="at step 5"):  # the one that was skipped before counts
        train(cfg, run, resume=True, console=Console(quiet=True))
    cfg["training"]["max_skipped"] = 2
    train(cfg, run, resume=True, console=Console(quiet=True))
    assert read_status(run)["state"] == "finished"


def test_a_norm_that_overflows_is_no_fault_of_a_layer(tmp_path, monkeypatch):
    real = LitGPT.training_step
    monkeypatch.setattr(LitGPT, "training_step", lambda self, batch, index: real(self, batch, index) * 1e38)
    with pytest.raises(UserError, match=r"gradient is no longer finite at step 1"):
        start(tmp_path, "training.clip=null")
