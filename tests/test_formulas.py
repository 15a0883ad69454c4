"""One part at a time against numbers a person worked out by hand."""

import math

import pytest
import torch

from softattn_lm.attention.bias import TensorBias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.projections import Separate
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt, LearnedPerHead, LogLength
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.layers import MLP, Smear, default_width
from softattn_lm.position.learned import Learned
from softattn_lm.position.rotary import Rotary


def column(*numbers: float) -> torch.Tensor:
    """One head of width 1: (1, 1, T, 1) in float64."""
    return torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, -1, 1)


def test_softmax_attention_by_hand():
    # Scores of the second query are 2·0 = 0 and 2·ln 3: its weights are 1/(1+9) and 9/(1+9).
    q, k, v = column(1.0, 2.0), column(0.0, math.log(3)), column(10.0, 20.0)
    kernel, given = Formula(n_head=1), {"scale": 1.0, "visible": Visibility(2)}
    expected = torch.tensor([[1.0, 0.0], [0.1, 0.9]], dtype=torch.float64)
    torch.testing.assert_close(kernel.weights(q, k, **given)[0, 0], expected, atol=1e-15, rtol=0)
    torch.testing.assert_close(kernel(q, k, v, **given)[0, 0, :, 0], torch.tensor([10.0, 19.0], dtype=torch.float64), atol=1e-14, rtol=0)


def test_a_bias_is_added_to_scores_before_the_softmax():
    q, k = column(0.0, 0.0), column(0.0, 0.0)
    bias = torch.tensor([[[0.0, 5.0], [math.log(4), 0.0]]], dtype=torch.float64)  # (H, T, S)
    a = Formula(n_head=1).weights(q, k, scale=1.0, visible=Visibility(2), bias=TensorBias(bias))
    torch.testing.assert_close(a[0, 0], torch.tensor([[1.0, 0.0], [0.8, 0.2]], dtype=torch.float64), atol=1e-15, rtol=0)


def test_a_window_of_two_reads_two_keys_itself_included():
    dense = Visibility(new=4, window=2).dense()
    assert dense.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert Visibility(new=3, past=1, window=2).dense().int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert Visibility(new=4, window=1).dense().equal(torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize("past", [0, 1, 5])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_counts_and_shortcuts_agree_with_the_dense_mask(past, window):
    for new in (1, 4):
        visible = Visibility(new, past, window)
        assert visible.count()[:, 0].tolist() == visible.dense().sum(-1).tolist()
        assert visible.reads_all == (new == 1 and bool(visible.dense().all()))
        triangle = torch.ones(new, past + new).tril().bool()  # torch's is_causal: aligned to the top left corner
        assert visible.is_plain_causal == (past == 0 and visible.dense().equal(triangle))


def test_a_window_that_reads_nothing_is_refused():
    with pytest.raises(UserError, match="mask.window=0"):
        Causal(0)


def test_scales_by_hand():
    visible = Visibility(3, past=1)
    assert InverseSqrt(64)(visible) == 0.125
    assert InverseDim(64)(visible) == 1 / 64
    assert Constant(0.3)(visible) == 0.3
    learned = LearnedPerHead(head_dim=16, n_head=2)
    assert learned(visible).tolist() == [[[0.25]], [[0.25]]]
    log = LogLength(head_dim=16, n_head=1, context=4, initial=2.0)(visible)  # counts 2, 3, 4
    torch.testing.assert_close(log[0, :, 0], torch.tensor([math.log(2), math.log(3), math.log(4)]) * 0.5)


def test_log_length_equals_inverse_sqrt_for_a_query_that_reads_a_full_context():
    scale = LogLength(head_dim=16, n_head=1, context=64)(Visibility(64))
    assert scale[0, -1, 0].item() == pytest.approx(0.25, abs=1e-7)
    assert scale[0, 0, 0].item() == 0.0


def test_inverse_sqrt_inverse_dim_and_none_are_bit_identical_at_head_width_one():
    visible = Visibility(5)
    q, k = torch.randn(1, 2, 5, 1), torch.randn(1, 2, 5, 1)
    first, second, third = (Formula(n_head=1).weights(q, k, scale=s(visible), visible=visible) for s in (InverseSqrt(1), InverseDim(1), Constant(1.0)))
    assert first.equal(second) and second.equal(third)


def test_variance_of_a_score_is_the_head_width_without_scale_and_one_with_it():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4000, 256, generator=generator) for _ in range(2))
    score = (q * k).sum(-1)
    assert score.var().item() == pytest.approx(256, rel=0.1)
    assert (InverseSqrt(256)(Visibility(1)) * score).var().item() == pytest.approx(1, rel=0.1)


def test_rotary_by_hand():
    # Head width 4, base 100: pairs (0, 2) and (1, 3) with frequencies 1 and 1/10.
    rotation = Rotary(head_dim=4, context=8, base=100.0).rotation(range(2, 3))
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    expected = torch.tensor([math.cos(2.0), -math.sin(0.2), math.sin(2.0), math.cos(0.2)])
    torch.testing.assert_close(rotation(x).flatten(), expected)


@pytest.mark.parametrize("shift", [1, 1000, 100_000])
def test_rotated_scores_depend_on_the_distance_only(shift):
    rotary = Rotary(head_dim=64, context=32)
    q, k = torch.randn(1, 1, 16, 64), torch.randn(1, 1, 16, 64)
    here, there = rotary.rotation(range(16)), rotary.rotation(range(shift, shift + 16))
    torch.testing.assert_close(here(q) @ here(k).mT, there(q) @ there(k).mT, atol=1e-4, rtol=0)


def test_rotation_keeps_lengths_and_a_fraction_leaves_the_rest_alone():
    rotation = Rotary(head_dim=8, context=32, fraction=0.5).rotation(range(3, 8))
    x = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(rotation(x).norm(dim=-1), x.norm(dim=-1))
    assert rotation(x)[..., 4:].equal(x[..., 4:])
    assert ((rotation(x) - x)[..., :4].norm(dim=-1) > 0.03 * x[..., :4].norm(dim=-1)).all()


def test_rotary_angles_beyond_the_table_continue_it():
    short, long = Rotary(head_dim=16, context=4), Rotary(head_dim=16, context=64)
    assert short.rotation(range(10, 30)).cos.equal(long.rotation(range(10, 30)).cos)


def test_an_odd_number_of_rotated_components_is_refused():
    with pytest.raises(UserError, match="head of 5"):
        Rotary(head_dim=5, context=4)


def test_a_learned_table_refuses_to_wrap_around():
    table = Learned(context=4, d_model=2)
    assert table.embed(range(1, 4)).equal(table.table[1:])
    with pytest.raises(UserError, match="knows 4 positions and was asked for 5"):
        table.embed(range(4, 5))


def test_grouped_heads_are_interleaved_not_tiled():
    groups = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
    assert expand_groups(groups, 4).flatten().tolist() == [1.0, 1.0, 2.0, 2.0]


def test_projections_split_one_product_into_queries_keys_and_values():
    projections = Separate(d_model=2, n_head=2, n_kv_head=1, head_dim=1, bias=False)
    with torch.no_grad():
        projections.qkv.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]))
    q, k, v = projections(torch.tensor([[[5.0, 7.0]]]))
    assert (q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()) == ([5.0, 7.0], [10.0], [21.0])


def test_smear_adds_the_predecessor_and_the_first_token_has_none():
    smear = Smear(1)
    with torch.no_grad():
        smear.gain.fill_(0.5)
    assert smear(torch.tensor([[[1.0], [2.0], [4.0]]]), None).flatten().tolist() == [1.0, 2.5, 5.0]


def test_mlps_by_hand():
    for kind, expected in (("relu2", [0.0, 4.0]), ("gelu", [-0.04550026, 1.95449974]), ("gelu_tanh", [-0.04540229, 1.95459771])):
        mlp = MLP(kind, 1, 1, bias=False)
        with torch.no_grad():
            mlp.up.weight.fill_(1.0)
            mlp.down.weight.fill_(1.0)
        torch.testing.assert_close(mlp(torch.tensor([[-2.0], [2.0]])).flatten(), torch.tensor(expected), atol=1e-6, rtol=0)
    swiglu = MLP("swiglu", 1, 1, bias=False)
    assert swiglu.gate is not None
    with torch.no_grad():
        for linear, weight in ((swiglu.up, 3.0), (swiglu.gate, 2.0), (swiglu.down, 1.0)):
            linear.weight.fill_(weight)
    # silu(2) · 3 = 2 / (1 + e⁻²) · 3
    torch.testing.assert_close(swiglu(torch.tensor([[1.0]])).item(), 6 / (1 + math.exp(-2)), atol=1e-6, rtol=0)


def test_every_mlp_has_the_same_parameters_by_default():
    assert 2 * 384 * default_width("gelu", 384) == 3 * 384 * default_width("swiglu", 384)


def test_one_lookup_among_orthonormal_keys_obeys_its_error_bound():
    # The soft dictionary: with query β·k_i the value error is at most (N−1)·e^(−β)·2·max|v|.
    n = 64
    keys, values = torch.eye(n, dtype=torch.float64)[None, None], torch.rand(1, 1, n, 1, dtype=torch.float64)
    for beta in (8.0, 16.0, 32.0):
        y = Formula(n_head=1)(beta * keys[:, :, -1:], keys, values, scale=1.0, visible=Visibility(1, past=n - 1))
        assert abs(y.item() - values[0, 0, -1, 0].item()) <= (n - 1) * math.exp(-beta) * 2 * values.max().item()
