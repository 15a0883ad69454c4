"""Decoding flat: the logits and the text of the ordinary cached path, for every model that is decoded so."""

from functools import partial

import pytest
import torch
from torch import nn

from softattn_lm.attention.kernels.auto import Auto
from softattn_lm.attention.kernels.blockwise import Blockwise
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.kernels.uniform import Uniform
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.projections import SharedKV
from softattn_lm.attention.scale import Constant, LogLength
from softattn_lm.attention.visibility import Causal
from softattn_lm.config.build import build
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder
from softattn_lm.model.decode import Decode, knows
from softattn_lm.model.generate import generate, in_bfloat16
from softattn_lm.model.ring import STEP
from softattn_lm.model.rows import Matrix
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from softattn_lm.position.sinusoidal import Sinusoidal
from tests.models import shaken, tiny_model

MODELS = {
    "plain": {},
    "gpt2_style": {"position": Learned, "norm": "layer", "mlp": "gelu_tanh", "bias": True, "tie_head": True},
    "fast": {
        "qk_norm": "rms",
        "norm_gain": False,
        "embed_norm": True,
        "mlp": "relu2",
        "smear": True,
        "value_embeddings": True,
    },
    "swiglu, groups, gains, biases": {"mlp": "swiglu", "n_kv_head": 2, "qk_norm": "rms_gain", "bias": True},
    "one group, a scale, a cap": {"n_kv_head": 1, "scale": lambda: Constant(0.3), "final_cap": 2.0, "mlp": "gelu"},
    "wide heads, no MLP": {"head_dim": 12, "mlp": "none", "norm": "layer", "norm_gain": False},
    "sinusoidal": {"position": Sinusoidal, "embed_norm": True},
    "no position": {"position": NoPosition},
    "half of a head turns": {"position": lambda head_dim, context: Rotary(head_dim, context, fraction=0.5)},
    "mixed positions": {"position": Pattern(["rotary", "none"], [Rotary, NoPosition]), "n_layer": 3},
    "window": {"mask": Causal(5)},
    "window and sinks": {"mask": Causal(5, sinks=2), "qk_norm": "rms"},
    "mixed masks": {"mask": Pattern(["a", "b"], [Causal(3), Causal(7, sinks=1)]), "n_layer": 3},
}
KERNELS = [SDPA, Formula, Blockwise, Auto]


def prompt(length: int, n: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (n, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def largest_difference(model, n: int, length: int, steps: int) -> float:
    """Between logits of a plan and of the model, over `steps` tokens behind a prompt."""
    cache, tokens = model.new_cache(), prompt(length + steps, n, seed=1).to(model.embed.weight.device)
    model(tokens[:, :length], cache)
    flat, worst = Decode(model, cache, n, length + steps), 0.0
    for token in tokens[:, length:].unbind(1):
        expected = model(token[:, None], cache)[:, -1]
        worst = max(worst, float((flat(token) - expected).abs().max() / expected.abs().max().clamp_min(1)))
    return worst


@pytest.mark.parametrize(("length", "n"), [(1, 3), (11, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(name, length, n):
    model = shaken(tiny_model(**MODELS[name]).double()).eval()
    assert knows(model)
    steps = model.context - length if model.absolute else 40  # beyond the context where the cache rolls
    assert largest_difference(model, n, length, steps) < 1e-6


@pytest.mark.parametrize("name", ["plain", "gpt2_style", "window and sinks"])
def test_logits_are_those_of_the_model_while_more_and_more_slots_are_laid_out(name):
    more = {"context": 5 * STEP} | MODELS[name] | ({"mask": Causal(2 * STEP, sinks=2)} if "window" in name else {})
    model = shaken(tiny_model(**more).double()).eval()
    assert largest_difference(model, 3, 2, 4 * STEP) < 1e-6


@torch.no_grad()
def test_samples_go_on_behind_one_prompt_as_behind_copies_of_it():
    model, tokens = shaken(tiny_model(**MODELS["fast"]).double()).eval(), prompt(9, n=3)
    one, three = model.new_cache(), model.new_cache()
    model(tokens[:1, :5], one)
    model(tokens[:1, :5].expand(3, -1), three)
    plans = [Decode(model, cache, 3, 9) for cache in (one, three)]
    for token in tokens[:, 5:].unbind(1):
        first, second = (plan(token) for plan in plans)
        torch.testing.assert_close(first, second, atol=1e-12, rtol=0)
    assert not first[0].equal(first[1])  # they went on differently


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_in_float32_are_those_of_every_kernel_of_the_family(kernel):
    model = shaken(tiny_model(kernel, **MODELS["fast"])).eval()
    assert knows(model) and largest_difference(model, 2, 7, 40) < 1e-4


@pytest.mark.parametrize(("length", "n"), [(1, 16), (40, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_drawn_texts_are_the_same_over_three_contexts(name, length, n):
    model = shaken(tiny_model(**MODELS[name]), seed=3)
    ids = prompt(length)[0].tolist()
    for temperature in (0, 1.0):
        write = partial(generate, model, ids, max_new_tokens=48, temperature=temperature, n=n)
        texts = [list(write(flat=flat)) for flat in (True, False)]
        assert texts[0] == texts[1] and len(texts[0]) == 48
    assert len({step[0] for step in texts[0]}) > 1  # a constant text would prove nothing


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8, "min_p": 0.02}])
def test_a_drawn_text_is_the_same_too(settings):
    model = shaken(tiny_model(**MODELS["fast"]))
    drawn = [list(generate(model, [1, 2], max_new_tokens=300, n=2, seed=4, flat=flat, **settings)) for flat in (1, 0)]
    assert drawn[0] == drawn[1] and len({step[0] for step in drawn[0]}) > 3


@pytest.mark.parametrize("recipe", ["fast", "plain", "gpt2_style"])
def test_every_shipped_recipe_is_decoded_flat(recipe):
    cfg = check(compose("train", [f"model={recipe}", "model.context=32"], config_folder()), "TrainSettings")
    model = shaken(build(cfg["model"], vocab_size=11, seed=0)).eval()
    assert knows(model) and largest_difference(model, 2, 3, 20) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["fast", "gpt2_style", "window and sinks"])
def test_logits_on_a_gpu_are_those_of_the_model(name):
    model = shaken(tiny_model(**MODELS[name])).double().eval().cuda()
    assert knows(model) and largest_difference(model, 2, 5, 11) < 1e-6


def gated(model):
    model.blocks[0].attention.out = nn.Sequential(model.blocks[0].attention.out)
    return model


def hooked(model):
    model.blocks[0].register_forward_hook(lambda module, given, made: None)
    return model


def with_a_parameter_of_its_own(model):
    model.blocks[1].attention.strength = nn.Parameter(torch.ones(1))
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny_model(Uniform),
        lambda: tiny_model(lambda n_head: Formula(n_head, soft_cap=3.0)),
        lambda: tiny_model(lambda n_head: Blockwise(n_head, sink="one")),
        lambda: tiny_model(position=ALiBi),
        lambda: tiny_model(scale=LogLength),
        lambda: tiny_model(projections=SharedKV),
        lambda: tiny_model(Pattern(["sdpa", "uniform"], [SDPA, Uniform])),
        lambda: tiny_model(output_gate="head"),
        lambda: tiny_model(short_conv=3),
        lambda: tiny_model(value_residual=True),
        lambda: gated(tiny_model()),
        lambda: hooked(tiny_model()),
        lambda: with_a_parameter_of_its_own(tiny_model()),
    ],
)
def test_what_is_not_known_is_left_to_the_model(model):
    built = shaken(model())
    assert knows(tiny_model()) and not knows(built)


def test_memory_does_not_grow_beyond_the_window():
    model = shaken(tiny_model(**MODELS["window and sinks"])).eval()
    sizes = set()
    for new in (100, 4000):
        cache = model.new_cache()
        model(prompt(9), cache)
        flat = Decode(model, cache, 1, 9 + new)
        sizes.add(sum(layer[1].store.untyped_storage().nbytes() for layer in flat.layers))
    assert len(sizes) == 1 and sizes != {0}


@pytest.mark.parametrize("name", ["gpt2_style", "fast", "window and sinks"])
def test_weights_in_bfloat16_give_nearly_the_same_logits(name):
    model = shaken(tiny_model(**MODELS[name])).eval()
    tokens = prompt(14, 2)
    with torch.no_grad():
        expected = model(tokens)[:, -1]
        half = in_bfloat16(model)
        cache = half.new_cache()
        half(tokens[:, :1], cache)
        flat = Decode(half, cache, 2, 14)
        for token in tokens[:, 1:].unbind(1):
            logits = flat(token)
    assert logits.dtype == torch.float32 and not logits.equal(expected)
    torch.testing.assert_close(logits, expected, atol=0.05 * float(expected.std()), rtol=0.05)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (512, 256)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_matrix_in_any_layout_is_the_linear_map(shape, batch, dtype, tolerance, biased):
    linear = nn.Linear(shape[1], shape[0], bias=biased, dtype=torch.float64).to(dtype)
    x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(0)).double()
    weight, bias = (None if p is None else p.detach() for p in (linear.weight, linear.bias))
    stream, row = torch.ones(batch, shape[0], dtype=torch.float64), torch.empty(batch, shape[0], dtype=torch.float64)
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, weight.double(), None if bias is None else bias.double())
        matrix = Matrix(weight, bias, batch)
        work = torch.promote_types(dtype, torch.float32)
        stream, row, x = stream.to(work), row.to(work), x.to(work)
        matrix.into(row, x)
        for made in (matrix(x), row, matrix.onto(stream, x) - 1):
            torch.testing.assert_close(made.double(), expected, atol=3 * tolerance, rtol=tolerance)


def test_a_generator_drawn_in_blocks_gives_the_numbers_it_gives_one_by_one():
    blocks, single = (torch.Generator().manual_seed(5) for _ in range(2))
    for vocabulary in (1, 3, 65, 1000):
        block = torch.rand((7, vocabulary), generator=blocks, dtype=torch.float64)
        rows = [torch.rand(vocabulary, generator=single, dtype=torch.float64) for _ in range(7)]
        assert block.equal(torch.stack(rows))
