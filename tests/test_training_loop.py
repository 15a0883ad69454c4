"""The loop through Lightning: what one optimizer step is, whatever surrounds it."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from softattn_lm.config.build import build
from softattn_lm.data.windows import TrainWindows
from softattn_lm.errors import UserError
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import load_run
from softattn_lm.training.lit import dropout_seed
from softattn_lm.training.prepared import described, prepared_data
from tests.tiny_run import losses, text, tiny_config, tiny_train


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One run that the others are compared with."""
    folder = tmp_path_factory.mktemp("reference")
    return folder, tiny_train(folder, "name=reference")


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.val_every=1"],
        ["training.val_every=50"],
        ["training.log_every=1"],
        ["training.log_every=100"],
        ["training.sample_every=1"],
        ["training.save_every=1", "training.keep_steps=log"],
        ["training.num_workers=2"],
        ["logger=csv"],
        ["logger=wandb"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_losses_do_not_depend_on_what_happens_beside_training(reference, overrides):
    folder, run = reference
    assert losses(tiny_train(folder, *overrides)) == losses(run)
    assert len(losses(run)) == 6


def test_another_seed_gives_other_losses(reference):
    folder, run = reference
    other = losses(tiny_train(folder, "seed=1"))
    assert len({*losses(run)[1:], *other[1:]}) == 10  # the first loss is ln V whatever the seed: the head starts at 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_is_a_plain_loop_written_out(tmp_path, optimizer):
    """Accumulation divides by the factor, the schedule moves per optimizer step, clipping comes after accumulation."""
    overrides = [f"optimizer={optimizer}", "schedule=cosine", "training.clip=0.1", "steps=5", "seed=3"]
    run = tiny_train(tmp_path, *overrides)
    cfg = tiny_config(tmp_path, *overrides)
    prepared = prepared_data(cfg)
    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=3)
    update, schedule = build(cfg["optimizer"])(model.parameter_roles()), build(cfg["schedule"])
    rates = [group["lr"] for group in update.param_groups]
    windows = TrainWindows(prepared.splits["train"].tokens, 16, 3, "permuted")
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    for step in range(5):
        for rate, group in zip(rates, update.param_groups, strict=True):
            group["lr"] = rate * schedule.multiplier(step, 5)
        total = []
        for m in range(2):
            torch.manual_seed(dropout_seed(3, 2 * step + m, 0))
            batch = torch.from_numpy(windows.batch(8 * step + 4 * m, 4))
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            (loss / 2).backward()
            total.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        update.step()
        update.zero_grad()
        assert rows[step]["loss"] == pytest.approx(sum(total) / 2, abs=1e-6)
        assert rows[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert rows[step]["grad_norm"] > 0.1  # so that clipping did something
        assert rows[step]["lr"] == pytest.approx(rates[0] * schedule.multiplier(step, 5))
    trained = load_run(run).model
    for (name, ours), theirs in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0, msg=name)


def test_accumulation_changes_nothing_but_rounding_without_dropout(tmp_path):
    whole, parts = (losses(tiny_train(tmp_path, "model.dropout=0", f"training.accumulate={n}")) for n in (1, 4))
    assert whole == pytest.approx(parts, abs=2e-5)


def test_validation_is_the_loss_over_the_whole_split_of_the_model_without_dropout(reference):
    folder, run = reference
    loaded = load_run(run)
    split = prepared_data(tiny_config(folder)).splits["validation"]
    nats = 0.0
    tokens = torch.from_numpy(split.tokens.astype("int64"))
    for start in range(0, len(tokens) - 1, 16):
        piece = tokens[start : start + 17]
        with torch.no_grad():
            nats += F.cross_entropy(loaded.model(piece[None, :-1])[0], piece[1:], reduction="sum").item()
    row = [row for row in read_metrics(run) if row["kind"] == "validation"][-1]
    assert row["tokens"] == len(tokens) - 1
    assert row["loss"] == pytest.approx(nats / (len(tokens) - 1), abs=1e-6)
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=1e-6)  # one byte per character here
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "validation"] == [3, 6]


def test_the_last_step_is_validated_when_the_interval_does_not_reach_it(tmp_path):
    run = tiny_train(tmp_path, "steps=5", "training.val_every=3")
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "validation"] == [3, 5]
    run = tiny_train(tmp_path, "steps=2", "training.val_every=1000")
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "validation"] == [2]


def test_on_a_text_of_independent_uniform_symbols_nothing_is_learned(tmp_path):
    generator = torch.Generator().manual_seed(0)
    symbols = torch.randint(8, (20000,), generator=generator)
    (tmp_path / "text.txt").write_text("".join("abcdefgh"[i] for i in symbols))
    run = tiny_train(tmp_path, "steps=40", "training.val_every=10", "batch_size=32", "model.dropout=0")
    rows = read_metrics(run)
    assert all(row["loss"] > math.log(8) - 0.01 for row in rows if row["kind"] == "validation")
    # A batch of 512 symbols is itself uneven by some hundredths; the mean over the run is not.
    assert sum(losses(run)) / 40 > math.log(8) - 0.01


def test_on_a_text_with_structure_something_is_learned(tmp_path):
    run = tiny_train(tmp_path, "steps=60", "training.val_every=60", "model.dropout=0")
    first, last = losses(run)[0], [r["loss"] for r in read_metrics(run) if r["kind"] == "validation"][-1]
    assert last < first - 0.4


def test_a_budget_in_tokens_or_epochs_comes_to_the_same_steps(tmp_path):
    run = tiny_train(tmp_path, "tokens=700")
    assert read_status(run) == {"state": "finished", "step": 6, "steps": 6, "error": None}  # 700 / 128 rounded up
    run = tiny_train(tmp_path, "epochs=0.1")  # of 5400 characters
    assert read_status(run)["steps"] == 5


def test_what_is_left_in_the_folder_says_what_was_done(tmp_path):
    run = tiny_train(tmp_path, "logger=csv", "training.sample_every=3")
    assert (run / "samples.txt").read_text().count("--- step ") == 2
    summary = json.loads((run / "summary.json").read_text())
    validation = [row for row in read_metrics(run) if row["kind"] == "validation"][-1]
    assert summary["validation"]["validation"]["loss"] == validation["loss"]
    assert summary["tokens"] == 6 * 128
    assert summary["tokens_per_second"] == pytest.approx(6 * 128 / summary["seconds"], rel=1e-6)
    table = (run / "metrics.csv").read_text().splitlines()
    figures = [row for row in read_metrics(run) if row["kind"] != "telemetry"]  # which has a table of its own
    assert len(table) == 1 + len(figures) and table[0].startswith("kind,step,loss")


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path):
    overrides = ["optimizer=adamw", "lr=1e20", "training.val_every=100", "training.log_every=1", "training.clip=null"]
    cfg = tiny_config(tmp_path, *overrides)
    run = new_run(cfg["runs"], "bad", cfg)
    with pytest.raises(UserError, match=r"no longer finite at step \d+.*smaller lr"):
        tiny_train(tmp_path, *overrides, resume=run)
    assert read_status(run)["state"] == "failed"
    assert not list((run / "checkpoints").glob("*")) if (run / "checkpoints").exists() else True


def test_several_validation_sets_are_each_measured_whole(tmp_path):
    (tmp_path / "more.txt").write_text(text(500, seed=9))
    run = tiny_train(tmp_path, f"+data.validation_sets.more={tmp_path / 'more.txt'}")
    rows = [row for row in read_metrics(run) if row["kind"] == "validation" and row["step"] == 6]
    assert [(row["name"], row["tokens"]) for row in rows] == [("validation", 599), ("more", 499)]


def test_a_run_without_a_validation_split_trains_and_saves(tmp_path):
    run = tiny_train(tmp_path, "data.val_fraction=0")
    assert load_run(run).step == 6
    assert read_status(run)["state"] == "finished"


def test_described_sizes_are_those_counted_by_hand(tmp_path):
    sizes = described(
        tiny_config(
            tmp_path,
            "model=plain",
            "model.n_layer=2",
            "model.n_head=2",
            "model.d_model=16",
            "model.context=16",
            "model.mlp=gelu",
            "model.bias=false",
            "model.norm_gain=false",
            "model.tie_head=false",
            "position=rotary",
        )
    )
    hidden = 2 * (4 * 16 * 16 + 2 * 4 * 16 * 16)
    head = sizes["vocab_size"] * 16
    assert sizes["parameters"] == hidden + 2 * head
    assert sizes["embedding_parameters"] == head
    assert sizes["flops_per_token"] == 6 * (hidden + head) + 12 * 2 * 16 * 8.5  # 8.5 keys read on average
