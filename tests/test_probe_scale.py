"""The theory of the scale: what is measured against laws, hand-made numbers and a plain draw of all components."""

import json
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from softattn_lm.attention.projections import Raw
from softattn_lm.attention.scale import InverseSqrt, LearnedPerHead
from softattn_lm.commands.probe_scale import layers, run, scale_policies
from softattn_lm.config.build import build
from softattn_lm.config.settings import ProbeScaleSettings
from softattn_lm.config.tree import choices, config_folder
from softattn_lm.errors import UserError
from softattn_lm.evaluation.scale_in_models import scores_at_start, scores_of_model
from softattn_lm.evaluation.scale_law import (
    Draw,
    Gradients,
    RowFigures,
    block_std,
    draw_rows,
    p_floor,
    soft_dictionary,
    weighed_rows,
)
from softattn_lm.position.alibi import ALiBi
from tests.models import shaken, tiny_model
from tests.tiny_run import tiny_config, tiny_train

KEYS, ROWS = 64, 40_000
ROOT_OF = {d_k: d_k**-0.5 for d_k in (64, 128, 256, 512, 1024)}


@pytest.fixture(scope="module")
def drawn() -> dict[int, Draw]:
    return {d_k: draw_rows(d_k, KEYS, ROWS, seed=0) for d_k in ROOT_OF}


def measured(draw: Draw, scale: float) -> tuple[RowFigures, Gradients]:
    scores = scale * draw.scores()
    weights = torch.softmax(scores, -1)
    return weighed_rows(scores, weights), draw.gradients(scale, weights)


def near(claim: float, digits: float) -> object:
    """To 5 %, and to the last digit that the claim gives."""
    return pytest.approx(claim, abs=0.05 * claim + 0.5 * digits)


# -- what is said of a missing scale ------------------------------------------------------------------------------


def test_without_a_scale_entropy_falls_from_3_7_to_0_58_at_width_64_and_0_13_at_1024(drawn):
    scaled = [measured(drawn[d_k], ROOT_OF[d_k])[0].entropy for d_k in (64, 1024)]
    assert scaled == [near(3.7, 0), near(3.7, 0)]
    assert measured(drawn[64], 1.0)[0].entropy == near(0.58, 0)
    assert measured(drawn[1024], 1.0)[0].entropy == near(0.13, 0)
    assert math.log(KEYS) == near(4.16, 0)


def test_the_median_jacobian_crosses_the_scaled_one_beyond_width_64_and_falls_by_a_thousand(drawn):
    def median(d_k: int, scale: float) -> float:
        return measured(drawn[d_k], scale)[0].quantiles[2]

    assert 1 < median(64, 1.0) / median(64, ROOT_OF[64]) < 1.5
    assert median(128, 1.0) < median(128, ROOT_OF[128])
    # Of a few thousand rows it comes out anywhere from 2e-4 to 3e-4.
    assert median(1024, 1.0) == pytest.approx(2.5e-4, rel=0.1)


def test_rows_whose_gradient_is_dead_grow_with_the_width_while_its_mean_rises(drawn):
    """Below 1e-3: of ‖∂L/∂q‖ where ‖∂L/∂y‖ = 1, and of the Jacobian alone. 4, 11, 20 and 31 % are said of the first;
    the second and the last of them are those of a smaller sample.
    """
    found = [measured(drawn[d_k], 1.0) for d_k in (64, 128, 256, 512)]
    assert [g.dead for _, g in found] == pytest.approx([0.038, 0.102, 0.202, 0.321], rel=0.05)
    assert [g.dead for _, g in found] == [near(0.04, 0.01), near(0.11, 0.01), near(0.20, 0.01), near(0.31, 0.01)]
    assert [rows.dead for rows, _ in found] == pytest.approx([0.068, 0.164, 0.295, 0.431], rel=0.05)
    means = [g.mean for _, g in found]
    assert means == sorted(means) and means[0] == near(1.40, 0)
    assert all(measured(drawn[d_k], ROOT_OF[d_k])[1].dead == 0 for d_k in ROOT_OF)


@pytest.mark.parametrize(("init", "std", "claim"), [("gpt2", 0.02, 0.40), ("fan_in", 128**-0.5, 8.0)])
def test_a_block_starts_with_the_standard_deviation_of_the_law(init, std, claim):
    dots = scores_at_start(d_k=64, d_model=128, n_keys=KEYS, init=init, seed=0)
    found = weighed_rows(dots, torch.softmax(dots, -1)).logit_std
    law = block_std(64, 128, std, std)
    assert law == near(claim, 0) and found == pytest.approx(law, rel=0.05)


# -- the soft dictionary ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "claim", "digits"), [(8, 8e-2, 1e-2), (16, 3e-5, 1e-5), (32, 3e-12, 1e-12)])
def test_the_value_error_falls_with_its_bound_and_the_bound_is_that_of_values_of_length_2(beta, claim, digits):
    found = soft_dictionary(beta)
    assert 2 * found.error_bound == near(claim, digits)
    assert found.error_bound / 4 < found.error < found.error_bound
    assert found.p_max == pytest.approx(1 / (1 + 63 * math.exp(-beta)), rel=1e-12)


def test_temperature_divides_and_a_tie_leaves_the_average_of_two():
    assert soft_dictionary(4, temperature=0.25) == soft_dictionary(16)
    assert soft_dictionary(60, tied=True).p_max == pytest.approx(0.5, rel=1e-12)
    assert soft_dictionary(60, tied=True).error > 0.1 > 1e-20 > soft_dictionary(60).error


def test_the_best_match_has_at_least_the_weight_of_the_floor():
    scores = torch.randn(500, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = scores.topk(2).values
    for temperature in (0.1, 1.0, 10.0):
        p = torch.softmax(scores / temperature, -1).amax(-1)
        floors = [p_floor(lead / temperature, 12) for lead in (best[:, 0] - best[:, 1]).tolist()]
        assert (p - torch.tensor(floors, dtype=p.dtype)).min() >= -1e-12


# -- how it is measured -------------------------------------------------------------------------------------------


def test_a_row_drawn_along_and_across_q_is_a_row_of_all_components():
    """Plainly: q, k and v of N(0, 1) components, and the gradient of y · g, |g| = 1, by torch."""
    d_k, rows, scale = 6, 6000, 1.0
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(rows, 1, d_k).requires_grad_(), normal(rows, 16, d_k), normal(rows, 16, d_k)
    g = torch.nn.functional.normalize(normal(rows, d_k, 1), dim=1)
    scores = scale * (q @ k.mT)  # (R, 1, N)
    weights = torch.softmax(scores, -1)
    (weights @ v @ g).sum().backward()
    assert q.grad is not None
    norms = q.grad.norm(dim=-1)
    plain = weighed_rows(scores.detach()[:, 0], weights.detach()[:, 0])
    figures, gradients = measured(draw_rows(d_k, 16, rows, seed=2), scale)
    for name in ("logit_std", "entropy", "p_max", "jacobian"):
        assert getattr(figures, name) == pytest.approx(getattr(plain, name), rel=0.03)
    assert gradients.mean == pytest.approx(norms.mean().item(), rel=0.03)
    assert gradients.median == pytest.approx(norms.median().item(), rel=0.03)


def test_every_shipped_scale_is_probed_and_at_width_1_they_are_one():
    assert {name: round(value, 4) for name, value in scale_policies(64, 64).items()} == {
        "constant": 0.12,
        "inverse_dim": 0.0156,
        "inverse_sqrt, learned, log_length": 0.125,
        "none": 1.0,
    }
    assert set(scale_policies(1, 64)) == {"constant", "inverse_dim, inverse_sqrt, learned, log_length, none"}


# -- checkpoints and the command ----------------------------------------------------------------------------------


SHIPPED = [f"attention={c}" for c in choices(config_folder(), "attention") if c != "custom"]
OTHERWISE = [
    "attention=delta attention.gate=true",
    "attention=formula attention.soft_cap=2 attention.sink=one position=alibi",
    "attention=forgetting position=alibi mask=sliding mask.window=5",
]


def seen(tmp_path, typed, scale):
    """The first layer of a tiny model as typed, under its own scale and two others."""
    position = [] if "position=" in typed else ["position=none"]
    cfg = tiny_config(tmp_path, *typed.split(), *position, *scale.split(), "model.dropout=0")
    model = shaken(build(cfg["model"], vocab_size=11, seed=0)).eval()
    text = np.random.default_rng(0).integers(11, size=100)
    return scores_of_model(model, text, lambda d_k, n_keys: {"same": d_k**-0.5, "sharp": 4.0})[0]


@pytest.mark.parametrize("typed", [*SHIPPED, *OTHERWISE])
def test_every_attention_is_seen_under_another_scale_as_it_would_be_with_it(typed, tmp_path):
    """A plain softmax of the scores stood in its place, and weights that are no shares had entropies below 0."""
    found = seen(tmp_path, typed, "scale=inverse_sqrt")
    figures = weighed_rows(found.dots.flatten(0, 1), found.weights.flatten(0, 1), found.rows_sum_to)
    n_keys = found.weights.shape[-1]
    assert -1e-9 <= figures.entropy <= math.log(n_keys) + 1e-9
    assert 1 / n_keys - 1e-9 <= figures.p_max <= 1 + 1e-9 and 0 <= figures.quantiles[0] <= figures.quantiles[-1] <= 1
    assert list(found.others) == (["same", "sharp"] if found.reads_scores else [])
    if found.reads_scores:
        assert_close(found.others["same"][1], found.weights, rtol=1e-6, atol=1e-9)
        sharp = seen(tmp_path, typed, "scale=constant scale.value=4.0")
        assert_close(found.others["sharp"][1], sharp.weights, rtol=1e-6, atol=1e-9)


def test_the_layers_of_a_model_are_seen_as_they_are_scaled_biased_and_bounded():
    text = np.random.default_rng(0).integers(11, size=100)
    model = tiny_model(scale=LearnedPerHead, position=ALiBi, init="fan_in").eval()
    with torch.no_grad():
        model.layers[0].attention.scale.gain *= 3
        _, weights = model(torch.from_numpy(text[:96].reshape(6, 16)), return_weights=True)
    for layer, found in enumerate(scores_of_model(model, text)):
        assert_close(found.weights, weights[layer][:, :, -1].double(), rtol=1e-5, atol=1e-7)
        assert found.law == pytest.approx((3 if layer == 0 else 1) * 1.0, rel=0.3) and found.bound is None
    bounded = scores_of_model(tiny_model(scale=InverseSqrt, qk_norm="rms").eval(), text)
    assert all(found.law is None and found.bound == pytest.approx(math.sqrt(8)) for found in bounded)
    assert scores_of_model(tiny_model(projections=Raw).eval(), text)[0].law is None


def test_a_run_is_shown_layer_by_layer_under_its_own_scale_and_every_other(tmp_path, capsys):
    folder = tiny_train(tmp_path, "name=mine", "steps=2", "model=plain")
    rows = layers(folder, ProbeScaleSettings(runs=str(tmp_path / "runs")))
    own, same = (next(r for r in rows if r["layer"] == 1 and r["scale"].startswith(s)) for s in ("its", "inverse_sqrt"))
    assert own["entropy"] == pytest.approx(same["entropy"], rel=1e-5) and own["law"] and not same["law"]
    run({"runs": str(tmp_path / "runs")}, ["mine"])
    assert "mine: the last query" in capsys.readouterr().out
    assert len(json.loads((folder / "probe_scale.json").read_text())) == len(rows) == 2 * 5


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("attention=uniform", "layer 1: Uniform reads no scores, and no scale"),
        ("attention=delta model.dropout=0", "its own"),
        ("attention=differential", "its own"),
        ("model.context=1 attention=sdpa", "its own"),
    ],
)
def test_no_table_holds_what_is_no_number(typed, said, tmp_path, capsys, recwarn):
    """Of one key there is no spread of scores, of a kernel that reads none there are no scores."""
    folder = tiny_train(tmp_path, "name=mine", "steps=2", *typed.split())
    capsys.readouterr()
    recwarn.clear()
    run({"runs": str(tmp_path / "runs")}, ["mine"])
    shown = capsys.readouterr().out
    assert said in shown and "nan" not in shown and "–" in shown
    assert not [str(warning.message) for warning in recwarn]
    rows = json.loads((folder / "probe_scale.json").read_text())
    assert all(0 <= row["entropy"] <= math.log(16) and 0 <= row["p_max"] <= 1 + 1e-9 for row in rows)


def test_a_place_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the folder .*file/probe_scale cannot be made"):
        run({"runs": str(tmp_path / "file")}, [])
    assert not capsys.readouterr().out


def test_the_theory_is_shown_drawn_and_written_down(tmp_path, capsys):
    run({"runs": str(tmp_path), "keys": 8, "rows": 100, "d_k": [4, 16], "d_model": 32}, [])
    said = capsys.readouterr().out
    assert all(words in said for words in ("8 orthonormal keys", "8 keys of N(0, 1)", "blocks of width 32", "log_leng"))
    found = json.loads((tmp_path / "probe_scale" / "probe_scale.json").read_text())
    assert len(found["drawn"]) == 2 * 4 and len(found["blocks"]) == 2 * 2 * 4
    assert (tmp_path / "probe_scale" / "probe_scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("setting", [{"keys": 1}, {"rows": 0}, {"d_model": 1}, {"d_k": []}, {"d_k": [0]}])
def test_sizes_that_are_none_are_refused_by_name(setting, tmp_path):
    with pytest.raises(UserError, match=next(iter(setting))):
        run({"runs": str(tmp_path), **setting}, [])
