"""One part at a time against numbers a person worked out by hand: kernels, scales, perceptrons."""

import math

import pytest
import torch

from softattn_lm.attention.bias import TensorBias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.hard import Hard
from softattn_lm.attention.kernels.topk import TopK
from softattn_lm.attention.kernels.uniform import Uniform
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt, LearnedPerHead, LogLength
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.layers import MLP, Smear, default_width


def column(*numbers: float) -> torch.Tensor:
    """One head of width 1: (1, 1, T, 1) in float64."""
    return torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, -1, 1)


def last_row(kernel, *scores: float, **given) -> torch.Tensor:
    """A of one query whose scores for its keys, itself included, are these: (S,)."""
    given.setdefault("visible", Visibility(1, past=len(scores) - 1))
    return kernel.weights(column(1.0), column(*scores), scale=1.0, **given)[0, 0, 0]


def close(actual: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=0)


# -- the softmax family ------------------------------------------------------------------------------------------------


def test_softmax_attention_by_hand():
    # Scores of the second query are 2·0 = 0 and 2·ln 3: its weights are 1/(1+9) and 9/(1+9).
    q, k, v = column(1.0, 2.0), column(0.0, math.log(3)), column(10.0, 20.0)
    kernel, given = Formula(n_head=1), {"scale": 1.0, "visible": Visibility(2)}
    expected = torch.tensor([[1.0, 0.0], [0.1, 0.9]], dtype=torch.float64)
    torch.testing.assert_close(kernel.weights(q, k, **given)[0, 0], expected, atol=1e-15, rtol=0)
    close(kernel(q, k, v, **given)[0, 0, :, 0], 10.0, 19.0)


def test_a_bias_is_added_to_scores_before_the_softmax():
    q, k = column(0.0, 0.0), column(0.0, 0.0)
    bias = torch.tensor([[[0.0, 5.0], [math.log(4), 0.0]]], dtype=torch.float64)  # (H, T, S)
    a = Formula(n_head=1).weights(q, k, scale=1.0, visible=Visibility(2), bias=TensorBias(bias))
    torch.testing.assert_close(a[0, 0], torch.tensor([[1.0, 0.0], [0.8, 0.2]], dtype=torch.float64), atol=1e-15, rtol=0)


def test_a_soft_cap_bounds_scores_by_its_tanh():
    # 2·tanh(s/2) of the scores 2·artanh(1/2) = ln 3 and 0 is 1 and 0.
    close(last_row(Formula(1, soft_cap=2.0), math.log(3), 0.0), math.e / (math.e + 1), 1 / (math.e + 1))
    # However large scores are, no key weighs more than e^(2c) times another.
    close(last_row(Formula(1, soft_cap=0.5), 1e9, -1e9), math.e / (math.e + 1), 1 / (math.e + 1))


def test_the_cap_is_on_scores_and_neither_on_the_bias_nor_on_the_mask():
    bias = TensorBias(torch.tensor([[[math.log(1000), 0.0]]], dtype=torch.float64))
    close(last_row(Formula(1, soft_cap=1.0), 0.0, 0.0, bias=bias), 1000 / 1001, 1 / 1001)
    seen = Visibility(1, past=2, window=2)
    close(last_row(Formula(1, soft_cap=1.0), 5.0, 0.0, 0.0, visible=seen), 0.0, 0.5, 0.5)


def test_softmax_plus_one_adds_one_to_the_denominator():
    close(last_row(Formula(1, sink="one"), math.log(2), math.log(3)), 2 / 6, 3 / 6)
    # A lookup may miss: with scores far below 0, nothing is read.
    assert last_row(Formula(1, sink="one"), -50.0, -50.0).sum().item() < 1e-20


def test_a_learned_sink_is_a_score_of_its_own_per_head_and_starts_as_softmax_plus_one():
    kernel = Formula(n_head=2, sink="learned").double()
    q, k = torch.ones(1, 2, 1, 1, dtype=torch.float64), torch.zeros(1, 2, 2, 1, dtype=torch.float64)
    given = {"scale": 1.0, "visible": Visibility(1, past=1)}
    assert kernel.weights(q, k, **given).equal(Formula(2, sink="one").weights(q, k, **given))
    with torch.no_grad():
        kernel.sink.copy_(torch.tensor([math.log(2), math.log(8)], dtype=torch.float64))
    close(kernel.weights(q, k, **given)[0, :, 0].flatten(), 1 / 4, 1 / 4, 1 / 10, 1 / 10)


def test_the_gradient_of_a_sink_is_what_the_row_gives_to_it():
    # y = Σ e^s v / (e^b + Σ e^s), so dy/db = −y · e^b / (e^b + Σ e^s): here y = 2·3/4 and the sink's share is 1/4.
    kernel = Formula(1, sink="learned").double()
    kernel(column(1.0), column(math.log(3)), column(2.0), scale=1.0, visible=Visibility(1)).sum().backward()
    close(kernel.sink.grad, -2 * 3 / 4 / 4)


def test_a_cap_that_is_not_positive_is_refused():
    with pytest.raises(UserError, match=r"attention\.soft_cap=0"):
        Formula(1, soft_cap=0.0)


# -- other weights -----------------------------------------------------------------------------------------------------


def test_hard_reads_the_best_match_and_the_earliest_of_equal_ones():
    close(last_row(Hard(), 1.0, 3.0, 2.0), 0.0, 1.0, 0.0)
    close(last_row(Hard(), 1.0, 2.0, 2.0), 0.0, 1.0, 0.0)
    close(last_row(Hard(), 9.0, 1.0, 2.0, visible=Visibility(1, past=2, window=2)), 0.0, 0.0, 1.0)
    padding = Visibility(1, past=1, documents=torch.tensor([[0, -1]]))
    close(last_row(Hard(), 1.0, 2.0, visible=padding), 0.0, 0.0)


def test_hard_has_the_gradient_of_the_softmax_in_its_place():
    # Scores 0 and ln 3, values 0 and 1: y = 1, and dy/ds of the softmax is ∓ 1/4 · 3/4.
    k = column(0.0, math.log(3)).requires_grad_()
    y = Hard()(column(1.0), k, column(0.0, 1.0), scale=1.0, visible=Visibility(1, past=1))
    y.sum().backward()
    assert y.item() == 1.0
    close(k.grad.flatten(), -3 / 16, 3 / 16)


def test_topk_is_the_softmax_over_the_k_best():
    scores = [math.log(x) for x in (1, 4, 2, 6)]
    close(last_row(TopK(top=1), *scores), 0.0, 0.0, 0.0, 1.0)
    close(last_row(TopK(top=2), *scores), 0.0, 0.4, 0.0, 0.6)
    close(last_row(TopK(top=3), *scores), 0.0, 4 / 12, 2 / 12, 6 / 12)
    close(last_row(TopK(top=9), *scores), 1 / 13, 4 / 13, 2 / 13, 6 / 13)
    # Hidden keys do not use up the k.
    close(last_row(TopK(top=2), *scores, visible=Visibility(1, past=3, window=3)), 0.0, 0.4, 0.0, 0.6)
    close(last_row(TopK(top=3), *scores, visible=Visibility(1, past=3, window=2)), 0.0, 0.0, 2 / 8, 6 / 8)


def test_a_top_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"attention\.top=0"):
        TopK(top=0)


def test_uniform_divides_by_what_is_visible_and_not_by_the_length():
    q = column(1.0, 2.0, 3.0, 4.0)
    a = Uniform().weights(q, q, scale=1.0, visible=Visibility(4, window=3))[0, 0]
    close(a.flatten(), 1, 0, 0, 0, 1 / 2, 1 / 2, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 1 / 3, 1 / 3, 1 / 3)
    y = Uniform()(q, q, column(6.0, 0.0, 3.0, 9.0), scale=1.0, visible=Visibility(4, window=3))
    close(y.flatten(), 6.0, 3.0, 3.0, 4.0)
    documents = torch.tensor([[0, 0, 1, -1]])
    a = Uniform().weights(q, q, scale=1.0, visible=Visibility(4, documents=documents))[0, 0]
    close(a.flatten(), 1, 0, 0, 0, 1 / 2, 1 / 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0)


def test_one_lookup_among_orthonormal_keys_obeys_its_error_bound():
    # The soft dictionary: with query β·k_i the value error is at most (N−1)·e^(−β)·2·max|v|.
    n = 64
    keys = torch.eye(n, dtype=torch.float64)[None, None]
    values = torch.rand(1, 1, n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = {"scale": 1.0, "visible": Visibility(1, past=n - 1)}
    exact = values[0, 0, -1, 0].item()
    for beta in (8.0, 16.0, 32.0):
        y = Formula(n_head=1)(beta * keys[:, :, -1:], keys, values, **given)
        assert abs(y.item() - exact) <= (n - 1) * math.exp(-beta) * 2 * values.max().item()
    assert Hard()(keys[:, :, -1:], keys, values, **given).item() == exact


# -- scales ------------------------------------------------------------------------------------------------------------


def test_scales_by_hand():
    visible = Visibility(3, past=1)
    assert InverseSqrt(64)(visible) == 0.125
    assert InverseDim(64)(visible) == 1 / 64
    assert Constant(0.3)(visible) == 0.3
    learned = LearnedPerHead(head_dim=16, n_head=2)
    assert learned(visible).tolist() == [[[0.25]], [[0.25]]]
    log = LogLength(head_dim=16, n_head=1, context=4, initial=2.0)(visible)  # counts 2, 3, 4
    torch.testing.assert_close(log[0, :, 0], torch.tensor([math.log(2), math.log(3), math.log(4)]) * 0.5)


def test_log_length_counts_what_the_query_may_read_and_not_where_it_stands():
    scale = LogLength(head_dim=1, n_head=1, context=4, initial=1.0)
    windowed = scale(Visibility(4, window=2)).flatten()
    torch.testing.assert_close(windowed, torch.tensor([0.0, math.log(2), math.log(2), math.log(2)]))
    packed = scale(Visibility(4, documents=torch.tensor([[0, 0, 1, -1]]))).flatten()
    torch.testing.assert_close(packed, torch.tensor([0.0, math.log(2), 0.0, 0.0]))


def test_log_length_equals_inverse_sqrt_for_a_query_that_reads_a_full_context():
    scale = LogLength(head_dim=16, n_head=1, context=64)(Visibility(64))
    assert scale[0, -1, 0].item() == pytest.approx(0.25, abs=1e-7)
    assert scale[0, 0, 0].item() == 0.0


def test_inverse_sqrt_inverse_dim_and_none_are_bit_identical_at_head_width_one():
    visible, generator = Visibility(5), torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 5, 1, generator=generator) for _ in range(2))
    scales = InverseSqrt(1), InverseDim(1), Constant(1.0)
    first, second, third = (Formula(n_head=1).weights(q, k, scale=s(visible), visible=visible) for s in scales)
    assert first.equal(second) and second.equal(third)


def test_variance_of_a_score_is_the_head_width_without_scale_and_one_with_it():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4000, 256, generator=generator) for _ in range(2))
    score = (q * k).sum(-1)
    assert score.var().item() == pytest.approx(256, rel=0.1)
    assert (InverseSqrt(256)(Visibility(1)) * score).var().item() == pytest.approx(1, rel=0.1)


# -- around the kernel -------------------------------------------------------------------------------------------------


def test_grouped_heads_are_interleaved_not_tiled():
    groups = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
    assert expand_groups(groups, 4).flatten().tolist() == [1.0, 1.0, 2.0, 2.0]


def test_smear_adds_the_predecessor_and_the_first_token_has_none():
    smear = Smear(1)
    with torch.no_grad():
        smear.gain.fill_(0.5)
    x = torch.tensor([[[1.0], [2.0], [4.0]]])
    assert smear(x, None).flatten().tolist() == [1.0, 2.5, 5.0]
    assert smear(x, None, places=torch.tensor([[0, 0, 1]])).flatten().tolist() == [1.0, 2.0, 5.0]


def test_mlps_by_hand():
    by_hand = {"relu2": [0.0, 4.0], "gelu": [-0.04550026, 1.95449974], "gelu_tanh": [-0.04540229, 1.95459771]}
    for kind, expected in by_hand.items():
        mlp = MLP(kind, 1, 1, bias=False)
        with torch.no_grad():
            mlp.up.weight.fill_(1.0)
            mlp.down.weight.fill_(1.0)
        y = mlp(torch.tensor([[-2.0], [2.0]])).flatten()
        torch.testing.assert_close(y, torch.tensor(expected), atol=1e-6, rtol=0)
    swiglu = MLP("swiglu", 1, 1, bias=False)
    assert swiglu.gate is not None
    with torch.no_grad():
        for linear, weight in ((swiglu.up, 3.0), (swiglu.gate, 2.0), (swiglu.down, 1.0)):
            linear.weight.fill_(weight)
    # silu(2) · 3 = 2 / (1 + e⁻²) · 3
    torch.testing.assert_close(swiglu(torch.tensor([[1.0]])).item(), 6 / (1 + math.exp(-2)), atol=1e-6, rtol=0)


def test_every_mlp_has_the_same_parameters_by_default():
    assert 2 * 384 * default_width("gelu", 384) == 3 * 384 * default_width("swiglu", 384)
