"""What telemetry says of attention, by hand; and that training does not notice it."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch.testing import assert_close

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.kernels.uniform import Uniform
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.commands.telemetry import run as show
from softattn_lm.config.build import build
from softattn_lm.config.tree import choices, config_folder
from softattn_lm.errors import UserError
from softattn_lm.evaluation.attention_rows import DEAD, jacobian_norm
from softattn_lm.evaluation.telemetry import FIGURES, Probe, head_figures, make_probe, per_layer, telemetry
from softattn_lm.evaluation.watching import Seen
from softattn_lm.position.alibi import ALiBi
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.training.checkpoint import read_checkpoint
from tests.models import shaken, tiny_model
from tests.tiny_run import tiny_config, tiny_train

TEXT = np.random.default_rng(0).integers(11, size=400)
NO_TEXT = torch.zeros(1, 0, dtype=torch.long)


class Fixed(AttentionKernel):
    """A is what it was made with."""

    rows_sum_to = "anything"

    def __init__(self, a: torch.Tensor) -> None:
        super().__init__()
        self.a = a

    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        return self.a


def seen_with(kernel: AttentionKernel, scores: torch.Tensor, scale: float = 1.0) -> Seen:
    """(T, T) scores before the scale, of one head and one text: keys are unit vectors."""
    n = len(scores)
    q, k = scores.double()[None, None], torch.eye(n, dtype=torch.float64)[None, None]
    return Seen(kernel, q, k, scale, Visibility(n), None, None)


def of_text(seen: Seen) -> dict[str, float]:
    """Figures of one head on one text, without an induction probe."""
    return {name: x.item() for name, x in head_figures(seen, Probe(NO_TEXT, 1, 0)).items()}


def telemetry_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == "telemetry"]


# -- figures by hand ----------------------------------------------------------------------------------------------


def test_the_figures_of_three_rows_worked_out_by_hand():
    one = math.log(2)
    # Row 0 reads one key and is left out, with its score of 50; the scores of the future, 99, are nobody's.
    scores = torch.tensor([[50.0, 99.0, 99.0], [-2 * one, 0.0, 99.0], [0.0, one, 0.0]])
    found = of_text(seen_with(Formula(n_head=1), scores / 4, scale=4.0))
    # p: (1/5, 4/5) and (1/4, 1/2, 1/4)
    h1, h2 = math.log(5) - 0.8 * math.log(4), 1.5 * one
    expected = {
        "entropy": (h1 + h2) / 2,
        "entropy_ratio": (h1 / one + h2 / math.log(3)) / 2,
        "support": (math.exp(h1) + math.exp(h2)) / 2,
        "logit_max": one,
        "logit_abs_max": 2 * one,
        "logit_std": one * math.sqrt((2 + 1 / 3) / 2),  # variances 2 and 1/3 of two and three numbers
        "first": (1 / 5 + 1 / 4) / 2,
        "previous": (1 / 5 + 1 / 2) / 2,
        "dead": 0.0,
    }
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_an_even_gaze_has_all_of_the_entropy_and_no_logits():
    text = torch.zeros(2, 4, dtype=torch.long)
    q = torch.zeros(2, 1, 4, 2)
    found = head_figures(Seen(Uniform(), q, q, 1.0, Visibility(4), None, None), Probe(text, 1, 2))
    assert not {"logit_max", "logit_abs_max", "logit_std"} & found.keys()
    values = {name: x.item() for name, x in found.items()}
    assert values["entropy"] == pytest.approx((math.log(2) + math.log(3) + math.log(4)) / 3)
    assert values["entropy_ratio"] == pytest.approx(1.0, abs=1e-15)  # in float32, ln n was off by 1e-8
    assert values["support"] == pytest.approx(3.0)
    assert values["first"] == values["previous"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert values["induction"] == pytest.approx((1 / 3 + 1 / 4) / 2)  # rows 2 and 3 of the repeated tokens


def test_weights_of_any_sign_and_sum_are_taken_as_shares_of_their_sizes():
    a = torch.tensor([[[[7.0, 0.0, 0.0], [-3.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]])
    found = of_text(seen_with(Fixed(a), torch.zeros(3, 3)))
    h = math.log(4) - 0.75 * math.log(3)
    assert found["entropy"] == pytest.approx(h / 2)  # a row of zeros has none
    assert found["first"] == pytest.approx(0.75 / 2)
    assert found["dead"] == 0.5  # and lets nothing through


def test_the_jacobian_norm_is_that_of_torch_and_a_row_of_two_dies_at_five_in_ten_thousand():
    scores = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, -1), scores)
    assert_close(jacobian_norm(torch.softmax(scores, -1)), whole.norm(), rtol=1e-12, atol=0)
    for rest, dead in ((4.9e-4, 1.0), (5.1e-4, 0.0)):
        lead = math.log((1 - rest) / rest)
        assert of_text(seen_with(Formula(n_head=1), torch.tensor([[0.0, 0.0], [lead, 0.0]])))["dead"] == dead
    assert DEAD == 1e-3


def test_a_sink_that_takes_the_whole_row_is_dead_though_its_shares_are_even():
    found = of_text(seen_with(Formula(n_head=1, sink="one"), torch.full((2, 2), -12.0)))
    assert found["dead"] == 1.0 and found["entropy_ratio"] == pytest.approx(1.0)


def test_the_induction_score_is_the_weight_behind_the_earlier_occurrence_of_the_token():
    probe = make_probe(TEXT, context=9, vocab_size=11)
    said = probe.tokens[probe.n_text :]
    a = torch.zeros(len(probe.tokens), 1, 9, 9, dtype=torch.float64)
    expected = 0
    for row, tokens in enumerate(said.tolist()):
        for i in range(1, 8):
            earlier = [j for j in range(i) if tokens[j] == tokens[i]]
            assert len(earlier) == (i >= 4)  # four tokens, each twice; the ninth belongs to neither half
            a[probe.n_text + row, 0, i, earlier[0] + 1 if earlier else 0] = 1.0
            expected += len(earlier)
    assert expected == 4 * len(said)
    q = torch.zeros(len(a), 1, 9, 2)
    found = head_figures(Seen(Fixed(a), q, q, 1.0, Visibility(9), None, None), probe)
    assert found["induction"].item() == 1.0


def test_a_window_hides_what_it_hides_from_every_figure():
    model = shaken(tiny_model(mask=Causal(1))).eval()
    rows = telemetry(model, make_probe(TEXT, 16, 11))
    assert all(row["entropy"] is None and row["logit_max"] is None and row["induction"] == 0 for row in rows)


# -- whole models -------------------------------------------------------------------------------------------------


def test_it_is_what_the_models_own_weights_say():
    """Grouped heads, a bias, a pattern: the figures of a layer are those of the A that the model returns."""
    kernels = Pattern(["sdpa", "formula"], [SDPA, Formula])
    model = shaken(tiny_model(kernels, position=ALiBi, n_kv_head=2, mask=Causal(7)), seed=1).eval()
    probe = make_probe(TEXT, 16, 11)
    rows = telemetry(model, probe)
    with torch.no_grad():
        _, weights = model(probe.tokens, return_weights=True)
    for row in rows:
        p = weights[row["layer"]][: probe.n_text, row["head"], 1:].double()
        assert row["entropy"] == pytest.approx(-torch.xlogy(p, p).sum(-1).mean().item(), rel=1e-5)
        assert row["first"] == pytest.approx(p[..., 0].mean().item(), rel=1e-5)


@pytest.mark.parametrize("attention", [c for c in choices(config_folder(), "attention") if c not in ("custom",)])
def test_every_shipped_attention_has_telemetry(attention, tmp_path):
    cfg = tiny_config(tmp_path, f"attention={attention}", "position=none", "model.dropout=0")
    model = build(cfg["model"], vocab_size=11, seed=0)
    rows = telemetry(model, make_probe(TEXT, 16, 11))
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (0, 1) for head in (0, 1)]
    for row in rows:
        assert 0 <= row["entropy_ratio"] <= 1 + 1e-9 and 1 - 1e-9 <= row["support"] <= 16
        reads = model.layers[row["layer"]].attention.kernel.reads_scores
        assert all((row[name] is not None) == reads for name in FIGURES if name.startswith("logit"))
        assert all(row[name] is not None for name in FIGURES if not name.startswith("logit"))


def test_qk_norm_holds_the_largest_logit_below_the_root_of_the_width_and_nothing_else_does():
    largest = {}
    for norm in ("none", "rms"):
        model = tiny_model(qk_norm=norm)
        with torch.no_grad():
            for block in model.layers:
                block.attention.projections.qkv.weight *= 100
        largest[norm] = max(row["logit_abs_max"] for row in telemetry(model, make_probe(TEXT, 16, 11)))
    assert largest["rms"] <= math.sqrt(8) * (1 + 1e-6) < largest["none"] / 100


def test_a_probe_leaves_mode_gradients_hooks_and_random_numbers_alone():
    model = tiny_model(attention=lambda n_head: SDPA(dropout=0.5), dropout=0.5).train()
    model.layers[1].eval()  # a person may have frozen a part
    modes, before = [part.training for part in model.modules()], torch.get_rng_state()
    telemetry(model, make_probe(TEXT, 16, 11))
    assert [part.training for part in model.modules()] == modes
    assert torch.get_rng_state().equal(before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(block.attention.kernel._forward_hooks for block in model.layers)


def test_a_text_shorter_than_the_context_is_one_window_without_padding():
    probe = make_probe(TEXT[:7], context=16, vocab_size=11, documents=np.array([0, 5]))
    assert probe.tokens.shape == (2, 7) and probe.tokens[0].tolist() == TEXT[:7].tolist()
    assert probe.documents is not None and probe.documents[0].tolist() == [1, 1, 1, 1, 1, 2, 2]


# -- training -----------------------------------------------------------------------------------------------------


def test_what_is_learned_is_bitwise_the_same_with_and_without_telemetry(tmp_path):
    learned = []
    for setting in ("true", "false"):
        run = tiny_train(
            tmp_path, f"training.telemetry={setting}", f"name=telemetry-{setting}", "attention.dropout=0.3"
        )
        assert bool(telemetry_rows(run)) == (setting == "true")
        learned.append(read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"])
    assert learned[0].keys() == learned[1].keys()
    assert all(learned[0][name].equal(learned[1][name]) for name in learned[0])


def test_training_steps_call_forward_only(tmp_path, monkeypatch):
    weights, looked = SDPA.weights, []

    def watched(self, *args, **given):
        assert not self.training, "a training step formed A"
        looked.append(self)
        return weights(self, *args, **given)

    monkeypatch.setattr(SDPA, "weights", watched)
    run = tiny_train(tmp_path, "attention=sdpa")
    assert len(looked) == 2 * 3 and len(telemetry_rows(run)) == 2 * 2 * 3  # layers, heads, steps 0, 3 and 6


def test_a_continued_run_has_every_row_once_and_as_if_it_had_never_stopped(tmp_path):
    straight = tiny_train(tmp_path, "name=straight", "schedule=constant")
    broken = tiny_train(tmp_path, "name=broken", "schedule=constant", "steps=3")
    rows = (broken / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text(rows + "".join(f'{{"kind": "telemetry", "step": {n}}}\n' for n in (5, 6)))
    tiny_train(tmp_path, "name=broken", "schedule=constant", resume=broken)
    assert {row["step"] for row in telemetry_rows(broken)} == {0, 3, 6}
    assert telemetry_rows(broken) == telemetry_rows(straight)


def test_tables_are_apart_loggers_get_layers_and_the_cost_is_told(tmp_path, monkeypatch):
    class Recording(Logger):
        name, version = "recording", 0
        logged: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

        def log_metrics(self, metrics, step=None):
            self.logged.append((step, metrics))

        def log_hyperparams(self, *args, **kwargs):
            pass

    monkeypatch.setattr("softattn_lm.training.fit.make_loggers", lambda *_: [Recording()])
    monkeypatch.setattr("softattn_lm.training.fit.finish_loggers", lambda _: None)
    run = tiny_train(tmp_path, "logger=csv")
    rows = telemetry_rows(run)
    with (run / "telemetry.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["entropy"]) for row in table] == [row["entropy"] for row in rows]
    assert "entropy" not in (run / "metrics.csv").read_text().splitlines()[0]
    heads = [row for row in rows if row["step"] == 6 and row["layer"] == 1]
    got = {step: metrics for step, metrics in Recording.logged if "telemetry/layer1/entropy" in metrics}
    assert sorted(got) == [0, 3, 6]
    assert got[6]["telemetry/layer1/entropy"] == pytest.approx(sum(row["entropy"] for row in heads) / 2)
    assert got[6]["telemetry/layer1/logit_max"] == max(row["logit_max"] for row in heads)
    assert '"validation_seconds"' in (run / "summary.json").read_text()


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_shows_the_first_and_last_step_and_draws_runs_side_by_side(tmp_path, capsys):
    a, b = tiny_train(tmp_path, "name=a"), tiny_train(tmp_path, "name=b", "attention=uniform")
    show({"runs": str(tmp_path / "runs"), "figure": None}, ["a", "b"])
    said = capsys.readouterr().out
    last = per_layer([row for row in telemetry_rows(a) if row["step"] == 6])[1]
    line = next(line for line in said.splitlines() if line.split()[:2] == ["1", "6"])
    assert line.split()[2] == f"{last['entropy']:.2f}"
    assert (a / "telemetry.png").read_bytes().startswith(b"\x89PNG") and (a / "telemetry.svg").is_file()
    assert not (b / "telemetry.png").exists()


@pytest.mark.parametrize(
    ("row", "lacking"),
    [({}, "layer"), ({"layer": "0"}, "layer"), ({"layer": 0, "entropy": "much"}, "entropy")],
)
def test_a_row_of_telemetry_that_is_none_is_one_line(row, lacking, tmp_path):
    run = tiny_train(tmp_path, "name=x", "steps=2")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "telemetry", "step": 2, **row}) + "\n")
    with pytest.raises(UserError, match=rf"metrics\.jsonl is damaged: .* at step 2 has no number as its {lacking}"):
        show({"runs": str(tmp_path / "runs"), "figure": None}, ["x"])


def test_a_layer_that_only_the_last_step_has_is_shown_for_that_step(tmp_path, capsys):
    run = tiny_train(tmp_path, "name=x", "steps=2")
    rows = [row for row in read_metrics(run) if not (row["kind"] == "telemetry" and row["step"] == 0 and row["layer"])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show({"runs": str(tmp_path / "runs"), "figure": None}, ["x"])
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [cells for cells in shown if cells and cells[0] in ("0", "1")] == [["0", "0"], ["0", "2"], ["1", "2"]]


@pytest.mark.parametrize(
    ("setting", "figure", "message"),
    [
        ("training.telemetry=false", None, "run x has no telemetry"),
        ("seed=0", "figure.jpeg", "type a name that ends in .png"),
        ("seed=0", "nowhere/figure.png", "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_shown_is_said(setting, figure, message, tmp_path):
    tiny_train(tmp_path, "name=x", "steps=2", setting)
    with pytest.raises(UserError, match=message):
        show({"runs": str(tmp_path / "runs"), "figure": figure}, ["x"])
