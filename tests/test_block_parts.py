"""What stands around a kernel: the short convolution, the output gate and the values of the first layer."""

import math

import pytest
import torch

from softattn_lm.attention.block import Given
from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.convolution import ShortConvolution
from softattn_lm.attention.kernels.hard import Hard
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.kernels.uniform import Uniform
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.projections import IdentityV, LowRank, Raw, Separate, SharedAll, SharedKV, SharedQK
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from softattn_lm.training.describe import describe
from tests.models import shaken, tiny_model
from tests.recurrent_kernel import Summing

PROJECTIONS = {p.__name__: p for p in (Separate, SharedKV, SharedQK, SharedAll, IdentityV, Raw, LowRank)}
PARTS = {
    "convolution": {"short_conv": 4},
    "gate of a head": {"output_gate": "head"},
    "gate of an element": {"output_gate": "element"},
    "first values": {"value_residual": True},
    "all": {"short_conv": 3, "output_gate": "element", "value_residual": True, "value_embeddings": True},
}


def text(rows: int, length: int) -> torch.Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(0))


def alone(**settings):
    """One layer of one head of width 1 over 1 component, q = k = v = x and out = 1, for arithmetic by hand."""
    shapes = {"n_layer": 1, "d_model": 1, "n_head": 1, "position": NoPosition, **settings}
    attention = tiny_model(Uniform, projections=Raw, **shapes).double().blocks[0].attention
    with torch.no_grad():
        attention.out.weight.fill_(1.0)
    return attention


def run(attention, numbers, **given):
    x = torch.tensor(numbers, dtype=torch.float64)[None, :, None]
    with torch.no_grad():
        return attention(x, Given(Visibility(len(numbers))), **given).y.flatten().tolist()


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_the_convolution_adds_earlier_tokens_by_their_weights():
    conv = ShortConvolution(0, 3, n_head=1, n_kv_head=1, head_dim=1).double()
    with torch.no_grad():
        for weight, by in ((conv.q, (1.0, 10.0, 100.0)), (conv.k, (2.0, 0.0, 1.0)), (conv.v, (0.0, 1.0, 0.0))):
            weight.copy_(torch.tensor(by).view(3, 1, 1, 1))
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(1, 1, 3, 1)
    q, k, v = (y.flatten().tolist() for y in conv(x, x, x, None, None))
    # q_t = x_t + 10 x_{t−1} + 100 x_{t−2}; k_t = 2 x_t + x_{t−2}; v_t = x_{t−1}
    assert (q, k, v) == ([1.0, 12.0, 123.0], [2.0, 4.0, 7.0], [0.0, 1.0, 2.0])


def test_the_convolution_starts_again_with_every_document():
    conv = ShortConvolution(0, 3, n_head=1, n_kv_head=1, head_dim=1)
    with torch.no_grad():
        conv.q.copy_(torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 5, 1)
    q, _, _ = conv(x, x, x, torch.tensor([[0, 1, 0, 1, 2]]), None)
    assert q.flatten().tolist() == [1.0, 12.0, 3.0, 34.0, 345.0]


def test_the_convolution_goes_on_where_an_earlier_call_ended():
    conv, cache = ShortConvolution(0, 3, n_head=1, n_kv_head=1, head_dim=1), KVCache([])
    with torch.no_grad():
        conv.q.copy_(torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
    parts = [conv(part, part, part, None, cache)[0].flatten().tolist() for part in x.split([1, 1, 2], dim=2)]
    assert parts == [[1.0], [12.0], [123.0, 234.0]]
    assert {name: held.shape for name, held in cache.fixed.items()} == {
        f"convolution 0 {name}": (1, 1, 2, 1) for name in "qkv"
    }


def test_a_head_is_multiplied_by_its_gate_and_an_element_by_its_own():
    settings = {"n_layer": 1, "d_model": 2, "position": NoPosition}
    x, given = torch.tensor([[[2.0, -3.0]]], dtype=torch.float64), Given(Visibility(1))
    for gate, n_head, rows, expected in (
        # two heads of width 1: w_1 x = 2 and w_2 x = ln 3 + 0
        ("head", 2, [[1.0, 0.0], [math.log(3) / 2, 0.0]], [2 / (1 + math.exp(-2)), -3 * 0.75]),
        # one head of width 2, one gate for both components
        ("head", 1, [[math.log(3) / 2, 0.0]], [1.5, -2.25]),
        ("element", 1, [[math.log(3) / 2, 0.0], [0.0, 0.0]], [1.5, -1.5]),
    ):
        model = tiny_model(SDPA, projections=Raw, n_head=n_head, output_gate=gate, **settings).double()
        attention = model.blocks[0].attention
        with torch.no_grad():
            attention.out.weight.copy_(torch.eye(2))
            attention.gate.weight.copy_(torch.tensor(rows, dtype=torch.float64))
            y = attention(x, given).y.flatten()
        torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_values_are_mixed_with_those_of_the_first_layer():
    # One token reads itself, so y = v = λ1 · x + λ2 · v_1, with v_1 = 10 given.
    model = tiny_model(SDPA, projections=Raw, n_layer=2, d_model=1, n_head=1, position=NoPosition, value_residual=True)
    first, second = (block.attention.double() for block in model.blocks)
    assert first.mix is None and second.mix.tolist() == [0.5, 0.5]
    with torch.no_grad():
        second.out.weight.fill_(1.0)
        second.mix.copy_(torch.tensor([2.0, 0.25]))
    assert run(second, [3.0], first=torch.full((1, 1, 1, 1), 10.0, dtype=torch.float64)) == [8.5]


def test_every_layer_mixes_in_the_values_of_the_first_and_of_no_other():
    model = shaken(tiny_model(n_layer=3, value_residual=True, short_conv=2, value_embeddings=True)).eval()
    seen = []
    for block in model.blocks:
        block.attention.register_forward_hook(
            lambda module, _, kwargs, result: seen.append((kwargs["first"], result.values)), with_kwargs=True
        )
    with torch.no_grad():
        model(text(2, 7))
    (none, values), (second, _), (third, _) = seen
    assert none is None and second is values and third is values
    # They are what the first layer averages, and not a bare projection.
    first = model.blocks[0]
    with torch.no_grad():
        x = first.attention_norm(model.embed(text(2, 7)))
        _, _, v = first.attention.convolution(*first.attention.projections(x), None, None)
        value = 0 if first.value is None else first.value(text(2, 7))
    torch.testing.assert_close(values, v + value)


# -- at the start, and what they are ----------------------------------------------------------------------------------


def test_a_convolution_starts_as_none():
    plain, convolved = tiny_model().eval(), tiny_model(short_conv=4).eval()
    idx = text(2, 16)
    with torch.no_grad():
        assert torch.equal(plain(idx), convolved(idx))


def test_other_parameters_start_the_same_with_and_without_the_parts():
    plain, rich = (dict(tiny_model(**settings).named_parameters()) for settings in ({}, PARTS["all"]))
    assert plain.keys() < rich.keys()
    assert all(torch.equal(parameter, rich[name]) for name, parameter in plain.items())
    added = {name.split("attention.")[1] for name in rich.keys() - plain.keys() if "attention." in name}
    assert added == {"convolution.q", "convolution.k", "convolution.v", "gate.weight", "mix"}


def test_matrices_of_a_gate_are_hidden_and_the_rest_are_vectors():
    roles = {r.name: r.role for r in tiny_model(**PARTS["all"]).parameter_roles()}
    assert roles["blocks.1.attention.gate.weight"] == "hidden"
    for name in ("convolution.q", "convolution.k", "convolution.v", "mix"):
        assert roles[f"blocks.1.attention.{name}"] == "vector"


def test_zeroed_outputs_leave_gates_convolutions_and_mixes_alone():
    attention = tiny_model(zero_out=True, **PARTS["all"]).blocks[1].attention
    assert attention.out.weight.abs().max() == 0 and attention.gate.weight.abs().min() > 0
    assert attention.mix.tolist() == [0.5, 0.5] and attention.convolution.q[0].min() == 1


def test_every_parameter_of_the_parts_gets_a_gradient():
    model = shaken(tiny_model(**PARTS["all"]))
    model(text(2, 16)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []


def test_the_parts_are_counted_in_what_a_token_costs():
    # 2 layers, 32 components: gates of 4 · 32 or 32 · 32 weights, three convolutions of 3 · 32, used once per token.
    costs = {name: describe(tiny_model(**settings), 1, 1) for name, settings in PARTS.items() if name != "all"}
    plain = describe(tiny_model(), 1, 1)
    added = {name: cost["flops_per_token"] - plain["flops_per_token"] for name, cost in costs.items()}
    assert added == {
        "convolution": 6 * 2 * 3 * 4 * 32,
        "gate of a head": 6 * 2 * 4 * 32,
        "gate of an element": 6 * 2 * 32 * 32,
        "first values": 0,
    }
    assert costs["first values"]["parameters"] - plain["parameters"] == 2


def test_a_state_costs_as_much_as_reading_as_many_keys_as_a_head_is_wide():
    # Beside the same weights: 16 tokens of context are 8.5 visible keys on average, and D = 8.
    keys, state = (describe(tiny_model(attention), 1, 1)["flops_per_token"] for attention in (SDPA, Summing))
    assert state - keys == 2 * 12 * 32 * (8 - 8.5)


# -- with a cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["convolution", "gate of a head", "first values", "all"])
@pytest.mark.parametrize("policy", PROJECTIONS)
def test_decoding_equals_the_full_pass_with_every_part_position_and_mask(parts, policy):
    for position in (Rotary, ALiBi, NoPosition, Learned):
        idx = text(2, 16 if position is Learned else 40)
        for mask in (Causal(), Causal(4, sinks=2)):
            settings = {"position": position, "mask": mask, "qk_norm": "rms_gain", **PARTS[parts]}
            model = shaken(tiny_model(projections=PROJECTIONS[policy], **settings)).eval()
            cache = model.new_cache()
            with torch.no_grad():
                chunks = idx.split([9, 1, 1, 5] if position is Learned else [9, 1, 1, 13, 16], dim=1)
                cached = torch.cat([model(part, cache) for part in chunks], dim=1)
                torch.testing.assert_close(
                    cached, model(idx), atol=3e-5, rtol=3e-5, msg=f"{position.__name__} {vars(mask)}"
                )


@pytest.mark.parametrize("parts", PARTS)
def test_a_hybrid_of_states_and_keys_decodes_with_every_part(parts):
    hybrid = Pattern(["delta", "sdpa"], [Summing, SDPA])
    model = shaken(tiny_model(hybrid, n_kv_head=2, n_layer=3, qk_norm="rms", **PARTS[parts])).eval()
    idx, cache = text(2, 40), model.new_cache()
    with torch.no_grad():
        cached = torch.cat([model(part, cache) for part in idx.split([9, 1, 1, 13, 16], dim=1)], dim=1)
        torch.testing.assert_close(cached, model(idx), atol=5e-5, rtol=5e-5)


def test_packed_documents_do_not_see_each_other_through_any_part():
    model = shaken(tiny_model(mask=Causal(4, documents=True), smear=True, **PARTS["all"])).eval()
    lengths, chunks = [9, 2, 19], [7, 1, 1, 4, 16, 1]
    idx, documents = text(1, 30), torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with torch.no_grad():
        alone = torch.cat([model(part) for part in idx.split(lengths, dim=1)], dim=1)
        packed, cache = model(idx, documents=documents), model.new_cache()
        parts = zip(idx.split(chunks, dim=1), documents.split(chunks, dim=1), strict=True)
        cached = torch.cat([model(part, cache, documents=numbers) for part, numbers in parts], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(cached, alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("parts", ["convolution", "first values"])
def test_keys_that_are_no_longer_values_are_cached_beside_them(parts):
    # In each of 2 layers 32 numbers of 4 bytes for keys and 32 for values; the first layer mixes its own with none.
    twice, once = 2 * 2 * 32 * 4, 2 * 32 * 4
    model = tiny_model(projections=SharedKV, **PARTS[parts])
    assert tiny_model(projections=SharedKV).cache_bytes_per_token() == once
    assert model.cache_bytes_per_token() == (twice if parts == "convolution" else once + 32 * 4)


def test_a_convolution_reaches_further_back_by_its_width_in_every_layer():
    plain, convolved = (tiny_model(mask=Causal(5), n_layer=3, short_conv=width) for width in (0, 4))
    assert convolved.receptive_field == plain.receptive_field + 3 * 3
    model, idx = shaken(convolved).eval(), text(1, 60)
    reach = model.receptive_field
    for back, changes in ((reach, False), (reach - 1, True)):
        other = idx.clone()
        other[:, -1 - back] = (other[:, -1 - back] + 1) % 11
        with torch.no_grad():
            assert torch.equal(model(idx)[:, -1], model(other)[:, -1]) != changes


def test_a_lookup_whose_weights_jump_trains_with_every_part():
    model = shaken(tiny_model(Hard, **PARTS["all"]))
    model(text(2, 16)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# -- refused ----------------------------------------------------------------------------------------------------------


def test_values_of_a_first_layer_that_is_the_only_one_are_refused():
    """It was taken, and nothing was mixed."""
    with pytest.raises(UserError, match=r"model\.n_layer=1 has none; type model\.value_residual=false"):
        tiny_model(n_layer=1, value_residual=True)


def test_a_convolution_that_sees_one_token_is_refused():
    for width in (1, -2):
        with pytest.raises(UserError, match=rf"model\.short_conv={width}.*type model\.short_conv=4, or 0"):
            tiny_model(short_conv=width)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("model.short_conv=1", r"model\.short_conv=1: model\.short_conv must be 2 tokens or more, or 0 for none"),
        ("model.output_gate=heads", r"model\.output_gate must be one of none, head, element"),
        ("model.value_residual=2", "true or false"),
    ],
)
def test_settings_of_the_parts_that_make_no_sense_are_refused_before_torch(typed, said):
    with pytest.raises(UserError, match=said):
        check(compose("train", [typed], config_folder()), "TrainSettings")
