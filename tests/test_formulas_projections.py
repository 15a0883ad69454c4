"""Which of Q, K and V are projections of their own: values, ties, parameters, and what the cache then holds."""

from functools import partial

import pytest
import torch

from softattn_lm.attention.projections import IdentityV, LowRank, Raw, Separate, SharedAll, SharedKV, SharedQK
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.block import make
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model

ALL = {p.__name__: p for p in (Separate, SharedKV, SharedQK, SharedAll, IdentityV, Raw, LowRank)}
X = torch.tensor([[[5.0, 7.0]]])  # (B, T, C)


def made(policy, weight=None, **settings):
    """For 2 heads of width 1 over 2 components."""
    shapes = {"d_model": 2, "n_head": 2, "n_kv_head": 2, "head_dim": 1, "bias": False}
    projections = make(policy, **shapes, **settings)
    if weight is not None:
        with torch.no_grad():
            projections.qkv.weight.copy_(torch.tensor(weight))
    return projections


def count(**settings):
    """Parameters of a model."""
    return sum(p.numel() for p in tiny_model(**settings).parameters())


def numbers(q, k, v):
    return q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()


def test_projections_split_one_product_into_queries_keys_and_values():
    projections = Separate(d_model=2, n_head=2, n_kv_head=1, head_dim=1, bias=False)
    with torch.no_grad():
        projections.qkv.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]))
    assert numbers(*projections(X)) == ([5.0, 7.0], [10.0], [21.0])


def test_ties_by_hand():
    double = [[2.0, 0.0], [0.0, 2.0]]
    mixed = [[1.0, 1.0], [0.0, 1.0], *double]
    assert numbers(*made(SharedKV, mixed)(X)) == ([12.0, 7.0], [10.0, 14.0], [10.0, 14.0])
    assert numbers(*made(SharedQK, mixed)(X)) == ([12.0, 7.0], [12.0, 7.0], [10.0, 14.0])
    assert numbers(*made(SharedAll, double)(X)) == ([10.0, 14.0], [10.0, 14.0], [10.0, 14.0])
    assert numbers(*made(IdentityV, mixed)(X)) == ([12.0, 7.0], [10.0, 14.0], [5.0, 7.0])
    assert numbers(*made(Raw)(X)) == ([5.0, 7.0], [5.0, 7.0], [5.0, 7.0])


def test_low_rank_is_a_product_of_two_matrices():
    projections = made(LowRank, rank=1)
    with torch.no_grad():
        projections.down.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
        for linear, factor in ((projections.q, 1.0), (projections.k, 2.0), (projections.v, 3.0)):
            linear.weight.copy_(factor * torch.tensor([[1.0], [-1.0]]))
    assert numbers(*projections(X)) == ([12.0, -12.0], [10.0, -10.0], [21.0, -21.0])


@pytest.mark.parametrize("policy", ALL)
def test_shapes_are_heads_and_groups(policy):
    grouped = policy in ("Separate", "SharedKV", "LowRank")
    shapes = {"d_model": 12, "n_head": 4, "n_kv_head": 2 if grouped else 4, "head_dim": 3}
    q, k, v = make(ALL[policy], bias=True, **shapes)(torch.ones(2, 5, 12))
    assert q.shape == (2, 4, 5, 3) and k.shape == v.shape == (2, shapes["n_kv_head"], 5, 3)


def test_parameters_are_counted():
    # C = 32, all heads together 32 wide, no bias: C² per projection; rank 4 has 3·(4·32 + 32·4).
    shapes = {"d_model": 32, "n_head": 4, "n_kv_head": 4, "head_dim": 8, "bias": False}
    counts = {Separate: 3, SharedKV: 2, SharedQK: 2, SharedAll: 1, IdentityV: 2, Raw: 0}
    for policy, matrices in counts.items():
        assert sum(p.numel() for p in make(policy, **shapes).parameters()) == matrices * 32 * 32
    assert sum(p.numel() for p in make(partial(LowRank, rank=4), **shapes).parameters()) == 3 * (4 * 32 + 32 * 4)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("policy", [SharedKV, SharedQK, SharedAll, IdentityV, Raw])
def test_saved_parameters_go_to_the_mlp_to_within_one_unit_per_layer(policy, mlp):
    # 35 is divisible by neither 2 nor 3: what is saved is no whole number of units.
    shapes = {"mlp": mlp, "n_layer": 3, "d_model": 35, "n_head": 5, "position": NoPosition}
    full, kept = count(**shapes), count(projections=policy, **shapes)
    given = count(projections=partial(policy, give_to_mlp=True), **shapes)
    unit = (3 if mlp == "swiglu" else 2) * 35
    assert kept < full - 3 * unit and abs(given - full) <= 3 * unit / 2


def test_a_bottleneck_wider_than_what_it_saves_takes_from_the_mlp():
    full = count()
    for rank in (4, 32):  # rank 32 of 32 doubles the projections
        assert abs(count(projections=partial(LowRank, rank=rank, give_to_mlp=True)) - full) <= 2 * 2 * 32 / 2


def test_without_an_mlp_there_is_nothing_to_give_to():
    with pytest.raises(UserError, match=r"model\.mlp=none"):
        tiny_model(projections=partial(SharedKV, give_to_mlp=True), mlp="none")


# -- what a tie means --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SharedQK, SharedAll, Raw])
def test_scores_of_queries_that_are_keys_are_symmetric_and_never_negative_definite(policy):
    attention = tiny_model(projections=policy).double().blocks[0].attention
    x = torch.randn(1, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, _ = attention.projections(x)
    scores = q @ k.mT
    torch.testing.assert_close(scores, scores.mT, atol=1e-12, rtol=0)
    assert torch.linalg.eigvalsh(scores).min() > -1e-10
    # With rows of one length, nothing matches a token better than itself.
    unit = torch.nn.functional.normalize(q, dim=-1)
    assert (unit @ unit.mT).argmax(-1).equal(torch.arange(7).expand(1, 4, 7))


def test_scores_of_separate_projections_are_not_symmetric():
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    q, k, _ = tiny_model().blocks[0].attention.projections(x)
    assert ((q @ k.mT) - (q @ k.mT).mT).abs().max() > 0.1


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (Raw, {"n_kv_head": 2}, r"projections=raw makes queries and keys one, so model\.n_kv_head=2"),
        (SharedQK, {"n_kv_head": 2}, "projections=shared_qk"),
        (SharedAll, {"n_kv_head": 2}, "projections=shared_all"),
        (IdentityV, {"n_kv_head": 2}, "projections=identity_v uses the input itself"),
        (Raw, {"n_kv_head": 1}, r"model\.n_head=4; type model\.n_kv_head=null or model\.n_kv_head=4"),
        (Raw, {"head_dim": 4}, r"head_dim = 16 must equal model\.d_model=32"),
        (partial(LowRank, rank=0), {}, r"projections\.rank=0"),
    ],
)
def test_ties_that_do_not_fit_the_shapes_are_refused_by_name(policy, settings, message):
    with pytest.raises(UserError, match=message):
        tiny_model(projections=policy, **settings)


# -- in a model, with a cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", ["none", "rms_gain"])
@pytest.mark.parametrize("policy", ALL)
def test_decoding_equals_the_full_pass_for_every_projection_position_and_mask(policy, qk_norm):
    idx = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(0))
    for position in (Rotary, ALiBi, NoPosition):
        for mask in (Causal(), Causal(4, sinks=2)):
            settings = {"projections": ALL[policy], "position": position, "mask": mask, "qk_norm": qk_norm}
            model = shaken(tiny_model(value_embeddings=True, **settings)).eval()
            with torch.no_grad():
                full, cache = model(idx), model.new_cache()
                cached = torch.cat([model(part, cache) for part in idx.split([9, 1, 1, 13, 16], dim=1)], dim=1)
            torch.testing.assert_close(cached, full, atol=2e-5, rtol=2e-5, msg=f"{position.__name__} {vars(mask)}")


@pytest.mark.parametrize("policy", [SharedKV, SharedAll, Raw])
def test_packed_documents_decode_from_one_stream_as_they_do_alone(policy):
    model = shaken(tiny_model(projections=policy, mask=Causal(4, documents=True), qk_norm="rms_gain")).eval()
    idx = torch.randint(11, (1, 30), generator=torch.Generator().manual_seed(0))
    lengths = [9, 2, 19]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    chunks, cache = [7, 1, 1, 4, 16, 1], model.new_cache()
    with torch.no_grad():
        alone = torch.cat([model(part) for part in idx.split(lengths, dim=1)], dim=1)
        parts = zip(idx.split(chunks, dim=1), documents.split(chunks, dim=1), strict=True)
        cached = torch.cat([model(part, cache, documents=numbers) for part, numbers in parts], dim=1)
    torch.testing.assert_close(cached, alone, atol=2e-5, rtol=2e-5)


def test_keys_that_are_values_are_cached_once():
    sizes = {}
    for name, policy in ALL.items():
        model = tiny_model(projections=policy, qk_norm="rms_gain")
        cache = model.new_cache()
        model(torch.tensor([[1]]), cache)
        sizes[name] = cache.bytes_per_token()
    two, one = 2 * 2 * 32 * 4, 2 * 32 * 4  # layers · (k and v) · width · bytes
    assert sizes == {name: one if name in ("SharedKV", "SharedAll", "Raw") else two for name in ALL}


def test_keys_that_are_values_are_normed_and_turned_and_values_are_not():
    model = shaken(tiny_model(projections=SharedKV, qk_norm="rms_gain", n_layer=1)).eval()
    attention = model.blocks[0].attention
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    turn = model.positions[0].rotation(range(5))
    q, k, v = attention.projections(x)
    q, k = turn(attention.q_norm(q)), turn(attention.k_norm(k))
    a = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~Visibility(5).dense(), -torch.inf), dim=-1)
    expected = attention.out((a @ v).transpose(1, 2).flatten(2))
    (given,) = model._given(range(5), 0, 5, None, None, x.device)
    torch.testing.assert_close(attention(x, given)[0], expected, atol=1e-5, rtol=1e-5)
