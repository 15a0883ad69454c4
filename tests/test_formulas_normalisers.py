"""Weights that are no plain softmax, against numbers worked out by hand and against other people's code."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from softattn_lm.attention.bias import DistanceBias, TensorBias
from softattn_lm.attention.kernels.differential import Differential
from softattn_lm.attention.kernels.forgetting import Forgetting, summed, tiled_decay
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.relu import ReLU
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.kernels.sigmoid import Sigmoid
from softattn_lm.attention.latent import Latent
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.contract import Subject, run_property
from softattn_lm.errors import UserError
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model
from tests.test_blockwise import Largest
from tests.test_formulas import close, column, last_row

PADDING = Visibility(1, past=1, documents=torch.tensor([[0, -1]]))


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- sigmoid and relu --------------------------------------------------------------------------------------------------


def test_a_sigmoid_is_shifted_by_the_log_of_what_is_visible():
    # σ(ln 2 − ln 2) = 1/2 and σ(ln 6 − ln 2) = σ(ln 3) = 3/4.
    close(last_row(Sigmoid(), math.log(2), math.log(6)), 1 / 2, 3 / 4)
    # Hidden keys do not count: of four keys, a window of two.
    seen = Visibility(1, past=3, window=2)
    close(last_row(Sigmoid(), 9.0, 9.0, math.log(2), math.log(6), visible=seen), 0.0, 0.0, 1 / 2, 3 / 4)
    close(last_row(Sigmoid(), 0.0, 0.0, 0.0, 0.0), 1 / 5, 1 / 5, 1 / 5, 1 / 5)
    close(last_row(Sigmoid(), 1.0, 2.0, visible=PADDING), 0.0, 0.0)


def test_a_sigmoid_may_be_divided_by_the_count_instead():
    close(last_row(Sigmoid(count="divide"), 0.0, math.log(3)), 1 / 4, 3 / 8)
    close(last_row(Sigmoid(count="divide"), 9.0, 0.0, math.log(3), visible=Visibility(1, 2, 2)), 0.0, 1 / 4, 3 / 8)


def test_only_the_shifted_sigmoid_can_read_one_of_many_keys_in_full():
    scores = [0.0] * 99 + [30.0]
    assert last_row(Sigmoid(), *scores)[-1].item() == pytest.approx(1.0, abs=1e-10)
    assert last_row(Sigmoid(count="divide"), *scores)[-1].item() == pytest.approx(0.01, abs=1e-10)


def test_a_rectified_score_is_divided_by_what_is_visible_and_its_square_as_well():
    close(last_row(ReLU(), -1.0, 3.0, 1.0), 0.0, 1.0, 1 / 3)
    close(last_row(ReLU(power=2), -1.0, 3.0, 1.0), 0.0, 3.0, 1 / 3)
    close(last_row(ReLU(power=2), 5.0, 3.0, -1.0, visible=Visibility(1, past=2, window=2)), 0.0, 9 / 2, 0.0)
    close(last_row(ReLU(), 1.0, 2.0, visible=PADDING), 0.0, 0.0)


def test_a_bias_is_added_before_a_key_is_weighed():
    bias = TensorBias(torch.tensor([[[math.log(3), -4.0]]], dtype=torch.float64))
    close(last_row(Sigmoid(), math.log(2), 4.0, bias=bias), 3 / 4, 1 / 3)
    close(last_row(ReLU(power=2), -1.0, 6.0, bias=bias), (math.log(3) - 1) ** 2 / 2, 2.0)


def test_sigmoid_weights_are_those_of_x_transformers_but_for_the_count():
    attend = pytest.importorskip("x_transformers.attend", reason="x-transformers, of the dev extra, is not installed")
    q, k, v = (normal(2, 4, 9, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    theirs, _ = attend.Attend(causal=True, scale=0.5, heads=4, sigmoid=True)(q, k, v)
    seen = Visibility(9)
    ours = Sigmoid(count="divide")(q, k, v, scale=0.5, visible=seen) * seen.count()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "property", ["weights_are_proper", "bias_is_honoured", "empty_rows_give_zero", "gradients_are_right"]
)
@pytest.mark.parametrize("policy", ["sigmoid, divided", "relu, squared"])
def test_the_contract_holds_for_what_no_yaml_chooses(policy, property):
    made = {"sigmoid, divided": lambda: Sigmoid(count="divide"), "relu, squared": lambda: ReLU(power=2)}[policy]
    verdict = run_property(property, Subject(policy, made))
    assert verdict.ok, verdict.worst


def test_other_counts_and_powers_are_refused():
    with pytest.raises(UserError, match=r"attention\.count=sum must be shift or divide"):
        Sigmoid(count="sum")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"attention\.power=3"):
        ReLU(power=3)


# -- differential ------------------------------------------------------------------------------------------------------


def with_share(kernel, first, second):
    """The kernel with exp(λq₁·λk₁) = first and exp(λq₂·λk₂) = second."""
    width = len(kernel.q_first)
    with torch.no_grad():
        for q, k, size in ((kernel.q_first, kernel.k_first, first), (kernel.q_second, kernel.k_second, second)):
            q.fill_(1.0)
            k.fill_(math.log(size) / width)
    return kernel


def test_a_second_softmax_is_subtracted_with_its_share():
    # Even components: scores ln 3 and 0, so 3/4 and 1/4; odd ones: 0 and ln 4, so 1/5 and 4/5. λ = 2 − 1.7 + 0.2.
    kernel = with_share(Differential(layer=0, head_dim=2).double(), 2.0, 1.7)
    q = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    k = torch.tensor([[math.log(3), 0.0], [0.0, math.log(4)]], dtype=torch.float64)[None, None]
    given = {"scale": 1.0, "visible": Visibility(1, past=1)}
    close(kernel.weights(q, k, **given).flatten(), 3 / 4 - 1 / 10, 1 / 4 - 4 / 10)
    v = torch.tensor([[10.0, 0.0], [20.0, 1.0]], dtype=torch.float64)[None, None]
    close(kernel(q, k, v, **given).flatten(), 3.5, -0.15)


@pytest.mark.parametrize(("layer", "share"), [(0, 0.2), (1, 0.355509), (3, 0.556058), (30, 0.799926)])
def test_the_share_starts_at_what_its_layer_says_and_the_gain_is_the_rest(layer, share):
    kernel = Differential(layer=layer, head_dim=8)
    assert kernel.initial == pytest.approx(share, abs=1e-6)
    assert kernel.head_gain == 1 - kernel.initial
    # Four products of N(0, 0.1²) have a standard deviation of 0.02.
    assert kernel.share().item() == pytest.approx(share, abs=0.1)


def test_with_a_share_of_nothing_it_is_the_softmax_of_the_even_components():
    kernel = with_share(Differential(layer=0, head_dim=8).double(), 1.0, 1.2)
    q, k = normal(2, 3, 7, 8), normal(2, 3, 7, 8, seed=1)
    given = {"scale": 0.5, "visible": Visibility(7, window=4)}
    expected = Formula(3).weights(q[..., ::2], k[..., ::2], **given)
    torch.testing.assert_close(kernel.weights(q, k, **given), expected, atol=1e-14, rtol=0)


def test_each_half_keeps_whole_rotary_pairs_and_sees_distances_only():
    x = normal(1, 1, 5, 16)
    turned = Rotary(head_dim=16, context=32).rotation(range(5))(x)[..., ::2]
    alone = Rotary(head_dim=8, context=32).rotation(range(5))(x[..., ::2])
    torch.testing.assert_close(turned, alone, atol=1e-6, rtol=1e-6)
    q, k = normal(1, 1, 9, 16, seed=1), normal(1, 1, 9, 16, seed=2)
    rotary, kernel = Rotary(head_dim=16, context=64), Differential(layer=2, head_dim=16)
    here, there = (
        kernel.weights(turn(q), turn(k), scale=0.5, visible=Visibility(9))
        for turn in (rotary.rotation(range(9)), rotary.rotation(range(40, 49)))
    )
    torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-5)


def shift_error(**settings):
    """How far logits move when the same text stands 37 tokens further on; heads of 8 components unless told."""
    model = shaken(tiny_model(Differential, **settings)).eval().double()
    idx = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (model(idx) - model(idx, start=37)).abs().max().item()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"head_dim": 12},
        {"head_dim": 10, "position": partial(Rotary, fraction=0.8)},
        {"head_dim": 12, "position": partial(Rotary, fraction=0.3333)},
        {"head_dim": 12, "projections": partial(Latent, rope_dim=4)},
        {"head_dim": 12, "projections": partial(Latent, rope_dim=8)},
    ],
)
def test_where_it_turns_the_text_may_stand_anywhere(settings):
    assert shift_error(**settings) < 1e-5


@pytest.mark.parametrize(
    ("settings", "turned", "typed"),
    [
        ({"head_dim": 10}, 10, "model.head_dim=12"),
        ({"head_dim": 2}, 2, "model.head_dim=4"),
        ({"head_dim": 12, "position": partial(Rotary, fraction=0.5)}, 6, "position.fraction=0.3333"),
        ({"head_dim": 12, "projections": Latent}, 6, "projections.rope_dim=4"),
        ({"head_dim": 4, "projections": Latent}, 2, "model.head_dim=8"),
        (
            {"attention": Pattern(["sdpa", "differential"], [SDPA, Differential]), "head_dim": 10},
            10,
            "model.head_dim=12",
        ),
    ],
)
def test_a_rotation_that_would_part_its_pairs_is_refused_and_what_is_typed_instead_is_taken(settings, turned, typed):
    """One component of a pair in each softmax: logits of the same text changed with where it stood."""
    said = rf"Differential of layer \d needs pairs.*multiple of 4 components of a head, not {turned}; type {typed}$"
    with pytest.raises(UserError, match=said):
        tiny_model(**{"attention": Differential, **settings})
    key, _, value = typed.partition(".")[2].partition("=")
    made = {
        "head_dim": {"head_dim": int(float(value))},
        "fraction": {"position": partial(Rotary, fraction=float(value))},
        "rope_dim": {"projections": partial(Latent, rope_dim=int(float(value)))},
    }[key]
    tiny_model(**{"attention": Differential, **settings, **made})


def test_the_same_widths_are_taken_where_nothing_turns_or_no_pair_is_parted():
    tiny_model(Differential, head_dim=10, position=NoPosition)
    tiny_model(SDPA, head_dim=10)


def test_a_head_that_has_no_halves_is_refused():
    with pytest.raises(UserError, match=r"model\.head_dim=7 is odd.*such as 8"):
        Differential(layer=0, head_dim=7)


def test_with_its_norm_it_is_the_layer_of_diffllama():
    module = pytest.importorskip(
        "transformers.models.diffllama.modeling_diffllama",
        reason="transformers, of the dev extra, is not installed or has no DiffLlama",
    )
    config = module.DiffLlamaConfig(
        hidden_size=32, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=3, attn_implementation="eager"
    )
    theirs = module.DiffLlamaAttention(config, layer_idx=2).eval()
    kernel = Differential(layer=2, head_dim=8)
    with torch.no_grad():
        for name in ("q", "k"):
            for number, half in ((1, "first"), (2, "second")):
                getattr(kernel, f"{name}_{half}").copy_(getattr(theirs, f"lambda_{name}{number}"))
    x, seen = normal(2, 6, 32, dtype=torch.float32), Visibility(6)
    mask = torch.zeros(6, 6).masked_fill(~seen.dense(), -torch.inf)[None, None]
    upright = torch.ones(2, 6, 4), torch.zeros(2, 6, 4)  # cos and sin of no rotation
    with torch.no_grad():
        expected = theirs(x, position_embeddings=upright, attention_mask=mask)[0]
        # Their head h and head h + 4, of width 4, are our head h: our even and odd components, and halves of its value.
        q, k, v = (
            project(x).unflatten(-1, (2, 4, 4)).permute(0, 3, 1, 4, 2)  # (B, 4, T, 4, 2)
            for project in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        )
        y = kernel(q.flatten(3), k.flatten(3), v.mT.flatten(3), scale=theirs.scaling, visible=seen)
        y = kernel.head_gain * F.rms_norm(y, (8,), eps=config.rms_norm_eps)
        ours = theirs.o_proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


# -- forgetting --------------------------------------------------------------------------------------------------------


def forgotten(*shares):
    """Features of one head of tokens that keep these shares of what came before them: (1, 1, S, 1)."""
    return column(*(math.log(share) for share in shares))


def test_a_key_fades_by_what_every_later_token_keeps():
    # All scores are 0. The last query keeps 1/3 of what the second kept 1/2 of: its weights are as 1/6 : 1/3 : 1.
    zero, given = column(0.0, 0.0, 0.0), {"scale": 1.0, "visible": Visibility(3)}
    kernel = Forgetting(d_model=1, n_head=1)
    a = kernel.weights(zero, zero, **given, features=forgotten(0.9, 1 / 2, 1 / 3))[0, 0]
    close(a.flatten(), 1, 0, 0, 1 / 3, 2 / 3, 0, 1 / 9, 2 / 9, 6 / 9)
    # What the first token keeps is of nothing.
    torch.testing.assert_close(
        kernel.weights(zero, zero, **given, features=forgotten(0.1, 1 / 2, 1 / 3))[0, 0], a, atol=1e-14, rtol=0
    )
    y = kernel(zero, zero, column(9.0, 18.0, 27.0), **given, features=forgotten(0.9, 1 / 2, 1 / 3))
    close(y.flatten(), 9.0, 15.0, 23.0)


def test_what_a_token_keeps_is_a_sigmoid_of_it_per_head():
    kernel = Forgetting(d_model=2, n_head=2).double()
    with torch.no_grad():
        kernel.gate.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        kernel.gate.bias.copy_(torch.tensor([0.0, math.log(3)], dtype=torch.float64))
    made = kernel.features(torch.tensor([[[math.log(4), 0.0]]], dtype=torch.float64))
    assert made.shape == (1, 2, 1, 1)
    close(made.exp().flatten(), 4 / 5, 3 / 4)
    assert Forgetting(d_model=2, n_head=2).gate.bias.tolist() == [0.0, 0.0]


def test_gates_that_stay_open_are_the_softmax_and_constant_ones_are_alibi():
    q, k = normal(2, 4, 9, 8), normal(2, 4, 9, 8, seed=1)
    seen, slopes = Visibility(9, window=6), ALiBi(n_head=4)
    kernel, given = Forgetting(d_model=32, n_head=4), {"scale": 0.5, "visible": seen}
    still = torch.zeros(2, 4, 9, 1, dtype=torch.float64)
    assert kernel.weights(q, k, **given, features=still).equal(Formula(4).weights(q, k, **given))
    constant = still - slopes.slopes[:, None, None]
    expected = Formula(4).weights(q, k, **given, bias=slopes.bias(seen))
    assert kernel.weights(q, k, **given, features=constant).equal(expected)


def test_gates_are_those_of_x_transformers():
    module = pytest.importorskip(
        "x_transformers.x_transformers", reason="x-transformers, of the dev extra, is not installed"
    )
    theirs, ours = module.DataDependentAlibi(32, 4), Forgetting(d_model=32, n_head=4)
    ours.gate.load_state_dict(theirs.to_forget_gates[0].state_dict())
    x, q, k = (normal(*shape, dtype=torch.float32) for shape in ((2, 9, 32), (2, 4, 9, 8), (2, 4, 9, 8)))
    seen = Visibility(9)
    expected = torch.softmax((0.5 * q @ k.mT + theirs(x)).masked_fill(~seen.dense(), -torch.inf), -1)
    a = ours.weights(q, k, scale=0.5, visible=seen, features=ours.features(x))
    torch.testing.assert_close(a, expected, atol=1e-6, rtol=1e-5)


MASKS = {
    "causal": Visibility(37),
    "behind a cache": Visibility(20, past=17),
    "window": Visibility(37, window=9),
    "documents": Visibility(37, documents=torch.stack((torch.arange(37) // 10, (torch.arange(37) - 4) // 40))),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_give_the_values_and_gradients_of_the_formula(mask, biased):
    seen, kernel = MASKS[mask], Forgetting(d_model=32, n_head=4).double()
    results = []
    for tiled in (False, True):
        q, k, v = (normal(2, heads, t, 8).requires_grad_() for heads, t in ((4, seen.new), (2, 37), (2, 37)))
        made = F.logsigmoid(normal(2, 4, 37, 1, seed=1)).requires_grad_()
        bias = DistanceBias(torch.tensor([0.5, 0.25, 0.0, 1.0]), seen) if biased else None
        if tiled:
            y = tiled_decay(0.5 * q, k, v, summed(made), seen, bias, query_block=8, key_block=5)
        else:
            y = kernel(q, k, v, scale=0.5, visible=seen, bias=bias, features=made)
        results.append([y, *torch.autograd.grad((y * torch.linspace(-1, 1, 8)).sum(), (q, k, v, made))])
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-10)


def test_two_thousand_tokens_in_float32_are_as_precise_as_their_scores():
    q, k, v = (normal(1, 2, 2000, 16, seed=seed) for seed in range(3))
    made = F.logsigmoid(normal(1, 2, 2000, 1, seed=3))  # sums to −1600, where neighbours in float32 are 1e-4 apart
    kernel, given = Forgetting(d_model=32, n_head=2), {"scale": 0.25, "visible": Visibility(2000)}
    sums = made.cumsum(2)
    exact = (0.25 * q @ k.mT + sums - sums.mT).masked_fill(~Visibility(2000).dense(), -torch.inf).softmax(-1) @ v
    fast = kernel(q.float(), k.float(), v.float(), **given, features=made.float())
    assert (fast - exact).abs().max().item() < 3e-6
    written_out = kernel.weights(q.float(), k.float(), **given, features=made.float()) @ v.float()
    assert (written_out - exact).abs().max().item() < 3e-6


def test_its_memory_does_not_grow_with_the_square_of_the_length():
    kernel = Forgetting(d_model=16, n_head=2)
    q, k, v = (torch.randn(1, 2, 1500, 8, requires_grad=True) for _ in range(3))
    made = kernel.features(torch.randn(1, 1500, 16))
    with Largest() as mode:
        tiled_decay(q, k, v, summed(made), Visibility(1500), query_block=64, key_block=64).sum().backward()
    assert mode.elements <= 2 * 1500 * 8


def test_a_bias_that_learns_gets_its_gradient_however_long_the_text_is():
    values = normal(2, 300, 300, dtype=torch.float32).requires_grad_()
    q, k, v = (normal(1, 2, 300, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    kernel = Forgetting(d_model=16, n_head=2)
    made = 0.01 * kernel.features(normal(1, 300, 16, dtype=torch.float32))
    y = kernel(q, k, v, scale=0.5, visible=Visibility(300), bias=TensorBias(values), features=made)
    (gradient,) = torch.autograd.grad(y[0, 0, -1, 0], values)
    assert gradient[0, -1].abs().min() > 0 and gradient[0, :-1].abs().max() == 0


def test_sinks_are_refused_since_what_lies_behind_them_is_not_kept():
    with pytest.raises(UserError, match=r"Forgetting of layer 0 cannot honour mask\.sinks: how much"):
        tiny_model(Forgetting, mask=Causal(4, sinks=1))
