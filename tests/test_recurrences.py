"""Kernels with a state against the recurrence of their paper, token by token in float64, and against numbers worked out
by hand.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from softattn_lm.attention.kernels.delta import Delta
from softattn_lm.attention.kernels.linear import Linear
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract import PROPERTIES, Subject, run_property
from softattn_lm.errors import UserError

CHUNK = 8
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)
B, H, D, SCALE = 2, 3, 5, 0.7
KERNELS = {
    "linear": Linear(chunk=CHUNK),
    "delta": Delta(4, H, chunk=CHUNK),
    "gated delta": Delta(4, H, gate=True, chunk=CHUNK),
}


# -- the papers' recurrences -------------------------------------------------------------------------------------------


def by_steps(name, q, k, v, features, state=None):
    """y, and what is remembered: S of shape (B, H, D_v, D_k), with its normaliser z (B, H, D_k) for `linear`."""
    return linear_by_steps(q, k, v, state) if name == "linear" else delta_by_steps(q, k, v, features, state)


def linear_by_steps(q, k, v, state):
    s, z = state or (q.new_zeros(B, H, D, D), q.new_zeros(B, H, D))
    ys = []
    for t in range(q.shape[2]):
        phi_q, phi_k = F.elu(SCALE * q[:, :, t]) + 1, F.elu(k[:, :, t]) + 1
        s = s + v[:, :, t, :, None] * phi_k[:, :, None, :]
        z = z + phi_k
        ys.append((s @ phi_q[..., None])[..., 0] / (z * phi_q).sum(-1, keepdim=True))
    return torch.stack(ys, dim=2), (s, z)


def delta_by_steps(q, k, v, features, state):
    s, one = q.new_zeros(B, H, D, D) if state is None else state, torch.eye(D, dtype=q.dtype)
    ys = []
    for t in range(q.shape[2]):
        beta = features[:, :, t, 0, None, None]
        alpha = torch.exp(features[:, :, t, 1, None, None]) if features.shape[-1] == 2 else 1.0
        key = k[:, :, t] / k[:, :, t].norm(dim=-1, keepdim=True)
        outer = key[..., :, None] * key[..., None, :]
        s = alpha * s @ (one - beta * outer) + beta * v[:, :, t, :, None] * key[:, :, None, :]
        ys.append((s @ (SCALE * q[:, :, t, :, None]))[..., 0])
    return torch.stack(ys, dim=2), s


def tokens(name, length, seed=0, dtype=torch.float64):
    """q, k, v (B, H, T, D) and features (B, H, T, E): β in (0, 1), α mostly near 1 and sometimes near 0."""
    generator = torch.Generator().manual_seed(100 * length + seed)
    q, k, v = (torch.randn(B, H, length, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    beta, depth = torch.rand(2, B, H, length, generator=generator, dtype=torch.float64)
    features = {"linear": None, "delta": beta[..., None], "gated delta": torch.stack((beta, -3 * depth**4), dim=-1)}
    return q, k, v, None if features[name] is None else features[name].to(dtype)


def forward(name, q, k, v, features):
    return KERNELS[name](q, k, v, scale=SCALE, visible=Visibility(q.shape[2]), features=features)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", KERNELS)
def test_all_three_forms_are_the_recurrence_of_the_paper(name, length):
    q, k, v, features = tokens(name, length)
    expected, _ = by_steps(name, q, k, v, features)
    kernel, visible = KERNELS[name], Visibility(length)
    a = kernel.weights(q, k, scale=SCALE, visible=visible, features=features)
    whole, _ = kernel.recur(q, k, v, None, scale=SCALE, features=features)
    for y in (forward(name, q, k, v, features), a @ v, whole):
        torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", KERNELS)
def test_training_in_float32_agrees_with_float64_step_by_step(name, length):
    exact = tokens(name, length)
    expected, _ = by_steps(name, *exact)
    y = forward(name, *(x if x is None else x.float() for x in exact))
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("later", LENGTHS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_state_carries_everything_over_from_the_text_before(name, later):
    before, after = tokens(name, 11), tokens(name, later, seed=1)
    _, remembered = by_steps(name, *before)
    expected, end = by_steps(name, *after, remembered)
    kernel = KERNELS[name]
    _, state = kernel.recur(*before[:3], None, scale=SCALE, features=before[3])
    y, state = kernel.recur(*after[:3], state, scale=SCALE, features=after[3])
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
    if name == "linear":
        torch.testing.assert_close(state["keys"], end[1], atol=1e-10, rtol=0)
        torch.testing.assert_close(state["values"], end[0].mT, atol=1e-10, rtol=0)
    else:
        torch.testing.assert_close(state["memory"], end.mT, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_through_chunks_are_those_of_the_recurrence(name):
    leaves = [x.requires_grad_() for x in tokens(name, 2 * CHUNK + 3) if x is not None]
    given = (*leaves[:3], leaves[3] if len(leaves) == 4 else None)
    probe = torch.randn(B, H, 2 * CHUNK + 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((by_steps(name, *given)[0] * probe).sum(), leaves)
    found = torch.autograd.grad((forward(name, *given) * probe).sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", [name for name, known in PROPERTIES.items() if "documents" not in name])
def test_the_contract_holds_with_a_gate(name):
    verdict = run_property(name, Subject("gated delta", partial(Delta, gate=True)))
    assert verdict.ok, verdict


# -- where arithmetic is hard ------------------------------------------------------------------------------------------


def test_decays_whose_ratio_no_float_can_hold_are_exact():
    # e^(−60) per token: over a chunk of 8 the inverse of the first decay would be e^480.
    q, k, v, features = tokens("gated delta", 3 * CHUNK)
    features[..., 1] = torch.where(torch.arange(3 * CHUNK) % 3 == 0, -60.0, -1e-3)
    expected, _ = by_steps("gated delta", q, k, v, features)
    low = [x.float() for x in (q, k, v, features)]
    torch.testing.assert_close(forward("gated delta", *low).double(), expected, atol=1e-5, rtol=0)
    a = KERNELS["gated delta"].weights(*low[:2], scale=SCALE, visible=Visibility(3 * CHUNK), features=low[3])
    torch.testing.assert_close((a @ low[2]).double(), expected, atol=1e-5, rtol=0)


def test_one_key_written_over_and_over_stays_exact_in_float32():
    # Powers of W would grow as binomials here and cancel; the triangular system does not.
    kernel, length = Delta(4, H, chunk=64), 128
    q, k, v, features = tokens("delta", length)
    k, features = k[:, :, :1].expand_as(k), torch.full_like(features, 0.99)
    expected, _ = by_steps("delta", q, k, v, features)
    low = [x.float() for x in (q, k, v)]
    y = kernel(*low, scale=SCALE, visible=Visibility(length), features=features.float())
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=0)


def test_queries_far_below_zero_still_read_an_average():
    # φ of −1000 is 0 in any float, and so would be the sum that it is divided by.
    q, k, v, _ = tokens("linear", 12, dtype=torch.float32)
    y = forward("linear", -1000 - q.abs(), k, v, None)
    assert (y.amin(2) >= v.amin(2) - 1e-5).all() and (y.amax(2) <= v.amax(2) + 1e-5).all()


def test_a_key_that_is_not_a_number_spoils_its_own_row_and_later_ones():
    q, k, v, features = tokens("delta", 2 * CHUNK)
    k[:, :, 3, 0] = torch.nan
    y = forward("delta", q, k, v, features)
    assert y[:, :, :3].isfinite().all() and y[:, :, 3:].isnan().all()


@pytest.mark.parametrize("name", KERNELS)
def test_states_are_summed_in_float32_under_autocast_and_for_bfloat16(name):
    q, k, v, features = tokens(name, 3 * CHUNK, dtype=torch.float32)
    plain = forward(name, q, k, v, features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(forward(name, q, k, v, features), plain)
        _, state = KERNELS[name].recur(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, scale=SCALE, features=features)
    assert {held.dtype for held in state.values()} == {torch.float32}


# -- by hand -----------------------------------------------------------------------------------------------------------


def rows(*of_tokens: tuple[float, ...]) -> torch.Tensor:
    """One head: (1, 1, T, D) in float64."""
    return torch.tensor(of_tokens, dtype=torch.float64)[None, None]


def test_linear_attention_by_hand():
    # φ(0) = 1, φ(1) = 2 and φ(−ln 2) = 1/2. The last query has features (2, 1/2) and meets those of its keys,
    # (1, 1), (2, 1/2) and (1/2, 2), with 5/2, 17/4 and 2: of 35/4 these are 10/35, 17/35 and 8/35.
    low = -math.log(2)
    q, k = rows((0, 0), (0, 0), (1, low)), rows((0, 0), (1, low), (low, 1))
    v, kernel, given = rows((7.0,), (35.0,), (35.0,)), Linear(), {"scale": 1.0, "visible": Visibility(3)}
    a = kernel.weights(q, k, **given)[0, 0]
    expected = torch.tensor([[1, 0, 0], [2 / 4.5, 2.5 / 4.5, 0], [10 / 35, 17 / 35, 8 / 35]], dtype=torch.float64)
    torch.testing.assert_close(a, expected, atol=1e-15, rtol=0)
    torch.testing.assert_close(kernel(q, k, v, **given)[0, 0, 2], torch.tensor([27.0]).double(), atol=1e-13, rtol=0)
    _, state = kernel.recur(q, k, v, None, scale=1.0)
    assert state["keys"].flatten().tolist() == pytest.approx([3.5, 3.5], abs=1e-14)
    assert state["values"].flatten().tolist() == pytest.approx([94.5, 94.5], abs=1e-13)


def test_the_scale_of_linear_attention_acts_before_the_features():
    low = -math.log(2)
    a = Linear().weights(rows((0.5, low / 2)), rows((0, 0), (1, low)), scale=2.0, visible=Visibility(1, past=1))
    assert a.flatten().tolist() == pytest.approx([2.5 / 6.75, 4.25 / 6.75], abs=1e-15)


def returned(k, v, beta, log_alpha=None):
    """What the state returns for the query (1, 0) after each token, by `forward` and `recur`, whatever the chunk."""
    q, length = rows(*[(1.0, 0.0)] * len(v)), len(v)
    columns = [beta] if log_alpha is None else [beta, log_alpha]
    features = torch.tensor(columns, dtype=torch.float64).T[None, None]
    given = {"scale": 1.0, "features": features}
    found = []
    for chunk in (1, 2, 64):
        kernel, values = Delta(1, 1, gate=log_alpha is not None, chunk=chunk), rows(*[(x,) for x in v])
        found.append(kernel(q, k, values, visible=Visibility(length), **given).flatten())
        found.append(kernel.recur(q, k, values, None, **given)[0].flatten())
    for y in found:
        torch.testing.assert_close(y, found[0], atol=1e-14, rtol=0)
    return found[0].tolist()


def test_a_key_written_twice_returns_the_last_value():
    # The sum of linear attention would return 12. How long a key is does not count.
    assert returned(rows((3, 0), (2, 0)), (5.0, 7.0), (1.0, 1.0)) == [5, 7]


def test_a_write_at_half_strength_goes_half_of_the_way():
    # 5/2, and from there half of the way to 7.
    assert returned(rows((1, 0), (1, 0)), (5.0, 7.0), (0.5, 0.5)) == [2.5, 4.75]


def test_a_write_leaves_other_keys_alone_by_how_far_they_are_from_it():
    # (0, 1) is a right angle away. (3, 4)/5 then returns 3/5 · 5 + 4/5 · 9 = 10.2 and is to return 8: of the −2.2 that
    # are written there, 3/5 arrive at (1, 0).
    found = returned(rows((1, 0), (0, 1), (3, 4)), (5.0, 9.0, 8.0), (1.0, 1.0, 1.0))
    assert found == pytest.approx([5, 5, 5 - 1.32], abs=1e-14)


def test_a_gate_forgets_before_it_writes():
    # 8, halved without a write: 4; halved again to 2, and half of the way to 6: 4. Then all is forgotten: 0.
    half = math.log(0.5)
    found = returned(rows(*[(1, 0)] * 4), (8.0, 1.0, 6.0, 3.0), (1.0, 0.0, 0.5, 0.0), (half, half, half, -100.0))
    assert found == pytest.approx([8, 4, 4, 0], abs=1e-14)


def test_strengths_and_gates_by_hand():
    # β = σ(ln 3 · x), α = exp(−e^(ln 2) · softplus(0)) = exp(−2 ln 2)
    kernel = Delta(d_model=1, n_head=1, gate=True).double()
    with torch.no_grad():
        kernel.beta.weight.fill_(math.log(3))
        kernel.log_rate.fill_(math.log(2))
        kernel.alpha.bias.zero_()
    beta, log_alpha = kernel.features(torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64))[0, 0].unbind(-1)
    assert beta.tolist() == pytest.approx([3 / 4, 1 / 4]) and log_alpha.exp().tolist() == pytest.approx([1 / 4, 1 / 4])


def test_gates_start_spread_over_the_heads_from_a_thousand_tokens_to_less_than_one():
    alpha = Delta(d_model=2, n_head=4, gate=True).features(torch.zeros(1, 1, 2))[0, :, 0, 1]
    assert alpha[0].item() == pytest.approx(-0.001, rel=1e-3) and alpha[-1].item() == pytest.approx(-1.6, rel=1e-3)
    assert (alpha.diff() < 0).all()


@pytest.mark.parametrize("kind", [Linear, partial(Delta, d_model=2, n_head=1)])
def test_what_a_state_cannot_do_is_said_when_it_is_made(kind):
    with pytest.raises(UserError, match=r"attention=(linear|delta) with dropout=0.1: it forms no weights"):
        kind(dropout=0.1)
    with pytest.raises(UserError, match=r"attention\.chunk=0"):
        kind(chunk=0)
