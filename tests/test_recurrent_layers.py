"""Layers that decode from a state: in the block, the cache and the decoder, alone and beside layers with keys."""

from functools import partial

import pytest
import torch

from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.projections import Raw, Separate, SharedAll, SharedKV
from softattn_lm.attention.scale import Constant, InverseSqrt, LogLength
from softattn_lm.attention.visibility import Causal
from softattn_lm.contract.property import PROPERTIES, run_property
from softattn_lm.contract.subject import Subject
from softattn_lm.contract.table import cache_size
from softattn_lm.errors import UserError
from softattn_lm.model.generate import generate
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model
from tests.recurrent_kernel import Normed, Summing

HYBRID = Pattern(["delta", "delta", "sdpa"], [Summing, Summing, SDPA])


def text(rows: int, length: int) -> torch.Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(0))


def cached(model, idx, chunks):
    cache = model.new_cache()
    with torch.no_grad():
        return torch.cat([model(part, cache) for part in idx.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("attention", [Summing, Normed, HYBRID], ids=["state", "normed", "hybrid"])
@pytest.mark.parametrize("position", [Rotary, NoPosition])
@pytest.mark.parametrize("scale", [InverseSqrt, LogLength])
def test_decoding_from_a_state_equals_the_full_pass_far_beyond_the_context(attention, position, scale):
    settings = {"position": position, "scale": scale, "n_layer": 3, "smear": True, "value_embeddings": True}
    model, idx = shaken(tiny_model(attention, n_kv_head=2, **settings)).eval(), text(2, 50)
    with torch.no_grad():
        full = model(idx)
    for chunks in (1, [13, 16, 1, 1, 1, 16, 2]):
        torch.testing.assert_close(cached(model, idx, chunks), full, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("policy", [Separate, SharedKV, SharedAll, Raw])
def test_every_projection_writes_to_a_state(policy):
    model, idx = shaken(tiny_model(HYBRID, projections=policy, n_layer=3, qk_norm="rms_gain")).eval(), text(2, 40)
    with torch.no_grad():
        torch.testing.assert_close(cached(model, idx, [9, 1, 1, 29]), model(idx), atol=5e-5, rtol=5e-5)


def test_a_state_reads_the_first_token_of_a_text_many_contexts_long_and_a_window_does_not():
    for attention, reads in ((Summing, True), (SDPA, False)):
        model, idx = shaken(tiny_model(attention, n_layer=1)).eval(), text(1, 100)
        other = idx.clone()
        other[:, 0] = (other[:, 0] + 1) % 11
        with torch.no_grad():
            assert torch.equal(model(idx)[:, -1], model(other)[:, -1]) != reads
        assert (model.receptive_field is None) == reads


def test_the_scale_of_the_length_counts_all_tokens_a_state_has_read():
    # One head, one layer: the scale of token 40 of 41 is that of 41 visible keys, and not of the context of 16.
    model = tiny_model(Summing, scale=LogLength, n_layer=1)
    cache = model.new_cache()
    model(text(1, 40), cache)
    (given,) = model._given(range(40, 41), 40, 1, None, cache, torch.device("cpu"))
    assert given.visible.count().item() == 41 and given.visible.window is None


def test_a_state_by_hand():
    # D = 1, H = 1: y_2 = scale · q_2 (k_1 v_1 + k_2 v_2), in one call and in two.
    q, k, v = (torch.tensor(x).view(1, 1, 2, 1) for x in ([1.0, 2.0], [3.0, 5.0], [7.0, 11.0]))
    y, state = Summing().recur(q, k, v, None, scale=0.5)
    assert y.flatten().tolist() == [10.5, 76.0] and state["sum"].item() == 76.0
    first, state = Summing().recur(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, scale=0.5)
    second, _ = Summing().recur(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], state, scale=0.5)
    assert [first.item(), second.item()] == [10.5, 76.0]


def test_the_norm_of_a_head_stands_behind_its_kernel_and_takes_its_gain():
    model = tiny_model(Normed, n_layer=1, d_model=2, n_head=1, position=NoPosition, scale=Constant)
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.out.weight.copy_(torch.eye(2))
        attention.head_norm.weight.copy_(torch.tensor([1.0, 3.0]))
        # q = k = [1, 0] and v = x = [3, 4], whose root mean square is √12.5
        attention.projections.qkv.weight.copy_(torch.tensor([[1 / 3, 0], [0, 0], [1 / 3, 0], [0, 0], [1, 0], [0, 1]]))
        (given,) = model._given(range(1), 0, 1, None, None, torch.device("cpu"))
        y = attention(torch.tensor([[[3.0, 4.0]]]), given).y.flatten()
    root = 12.5**0.5
    torch.testing.assert_close(y, torch.tensor([0.5 * 3 / root, 0.5 * 3 * 4 / root]))


def test_a_state_costs_the_same_after_one_token_and_after_a_thousand():
    model = tiny_model(Summing)
    cache, sizes = model.new_cache(), []
    with torch.no_grad():
        for _ in range(4):
            model(text(2, 1), cache)
            sizes.append(cache.nbytes())
        for _ in range(20):
            model(text(2, 50), cache)
        sizes.append(cache.nbytes())
    # 2 layers · batch 2 · 4 heads · 8 · 8 numbers of 4 bytes
    assert set(sizes) == {2 * 2 * 4 * 8 * 8 * 4}
    assert model.cache_bytes_per_token() == 0 and model.cache_state_bytes() == 2 * 4 * 8 * 8 * 4


def test_a_hybrid_keeps_keys_of_its_softmax_layers_only():
    model = tiny_model(HYBRID, n_layer=3)
    assert model.cache_bytes_per_token() == tiny_model(SDPA, n_layer=1).cache_bytes_per_token()
    assert model.cache_state_bytes() == 2 * 4 * 8 * 8 * 4


def test_the_table_of_variants_says_in_letters_what_a_layer_remembers():
    assert cache_size(Subject("keys", SDPA)) == "8·G·D"
    assert cache_size(Subject("state", Summing)) == "constant: 4·H·D·D"


def test_calls_with_the_cache_do_not_change_a_state_that_somebody_else_holds():
    model = tiny_model(Summing, n_layer=1)
    cache = model.new_cache()
    with torch.no_grad():
        model(text(1, 3), cache)
        held = cache.state(0, 1)["sum"]
        before = held.clone()
        model(text(1, 3), cache)
    assert torch.equal(held, before)


def test_weights_of_a_state_are_refused_with_a_cache_and_given_without():
    model = tiny_model(HYBRID, n_layer=3)
    _, weights = model(text(1, 5), return_weights=True)
    assert [a.shape for a in weights] == [(1, 4, 5, 5)] * 3
    with pytest.raises(UserError, match=r"Summing of layer 0 decodes from a state.*without a cache"):
        model(text(1, 5), model.new_cache(), return_weights=True)


def test_another_batch_with_the_same_cache_is_refused_in_one_sentence():
    model = tiny_model(Summing)
    cache = model.new_cache()
    model(text(2, 5), cache)
    with pytest.raises(UserError, match="a batch of 2 and got 3"):
        model(text(3, 5), cache)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mask": Causal(5)}, r"mask\.window"),
        ({"mask": Causal(documents=True)}, r"mask\.documents"),
        ({"position": ALiBi}, "position=alibi"),
    ],
)
def test_what_a_state_cannot_honour_is_refused_with_its_layer(settings, said):
    pattern = Pattern(["sdpa", "delta"], [SDPA, Summing])
    with pytest.raises(UserError, match=f"Summing of layer 1 cannot honour {said}"):
        tiny_model(pattern, **settings)


@pytest.mark.parametrize("attention", [Summing, HYBRID], ids=["state", "hybrid"])
@pytest.mark.parametrize("position", [Rotary, NoPosition, Learned])
def test_greedy_text_needs_no_cache_over_three_contexts(attention, position):
    model = shaken(tiny_model(attention, n_layer=3, position=position)).eval()
    greedy = partial(generate, model, [1, 2, 3], max_new_tokens=48, temperature=0.0)
    assert list(greedy()) == list(greedy(use_cache=False))


OF_MODELS = [name for name, known in PROPERTIES.items() if known.measure.__module__.endswith(".models")]


@pytest.mark.parametrize("name", OF_MODELS)
@pytest.mark.parametrize("attention", [Summing, HYBRID], ids=["state", "hybrid"])
def test_the_contract_of_models_holds_for_layers_with_a_state(attention, name):
    verdict = run_property(name, Subject("with a state", attention, {"n_layer": 3}))
    assert verdict.ok, verdict
    assert verdict.tried == (name != "documents_are_apart")


def test_the_contract_catches_a_state_that_is_not_carried_on():
    class Forgetful(Summing):
        def recur(self, q, k, v, state, *, scale, features=None):
            return super().recur(q, k, v, None, scale=scale, features=features)

    for name in ("cached_equals_full", "cached_equals_full_beyond_the_window", "greedy_text_needs_no_cache"):
        assert not run_property(name, Subject("forgetful", Forgetful)).ok
