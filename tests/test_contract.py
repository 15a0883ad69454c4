"""What every attention variant must keep, whoever writes it: variants are found by globbing configs/attention."""

import itertools
from pathlib import Path

import pytest
import torch
import yaml

from softattn_lm.attention.bias import TensorBias
from softattn_lm.attention.block import CausalSelfAttention, Given
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.projections import Separate
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt, LearnedPerHead, LogLength
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.config.build import build
from softattn_lm.model.decoder import make
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model

VARIANTS = sorted(path.stem for path in Path("configs/attention").glob("*.yaml"))
SCALES = [InverseSqrt, InverseDim, Constant, LearnedPerHead, LogLength]
POSITIONS = [Rotary, Learned, NoPosition]
SHAPES = {"n_head": 4, "n_kv_head": 2, "head_dim": 8, "d_model": 32, "context": 64, "layer": 0}


def variant(name, dropout=0.0):
    node = yaml.safe_load(Path(f"configs/attention/{name}.yaml").read_text())
    return build({**node, "dropout": dropout})


def inputs(new, past=0, heads=4, groups=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(new + past)
    shapes = (heads, new), (groups, past + new), (groups, past + new)
    return [torch.randn(2, h, t, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for h, t in shapes]


@pytest.fixture(params=VARIANTS)
def name(request):
    return request.param


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("new", "past", "window"), [(1, 0, None), (1, 12, None), (5, 0, 64), (31, 0, 7), (33, 3, 9), (6, 17, None), (1, 8, 4)])
def test_values_and_gradients_equal_the_formula(name, new, past, window, scale):
    visible = Visibility(new, past, window)
    factor = make(scale, **SHAPES)(visible)
    results = []
    for kernel in (make(variant(name), **SHAPES), Formula(n_head=4)):
        q, k, v = inputs(new, past)
        y = kernel(q, k, v, scale=factor, visible=visible)
        results.append([y, *torch.autograd.grad((y * torch.linspace(-1, 1, 8)).sum(), (q, k, v))])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_forward_is_weights_times_values_and_rows_sum_to_one(name):
    kernel = make(variant(name), **SHAPES)
    q, k, v = inputs(9, 4)
    given = {"scale": 0.5, "visible": Visibility(9, 4, window=6)}
    a = kernel.weights(q, k, **given)
    torch.testing.assert_close(kernel(q, k, v, **given), a @ v, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.sum(-1), torch.ones(2, 4, 9))
    assert (a[..., ~given["visible"].dense()] == 0).all()


def test_a_bias_changes_the_result_as_the_formula_says(name):
    q, k, v = inputs(7, 2)
    bias = torch.randn(4, 7, 9)
    given = {"scale": 0.5, "visible": Visibility(7, 2), "bias": TensorBias(bias)}
    torch.testing.assert_close(make(variant(name), **SHAPES)(q, k, v, **given), Formula(n_head=4)(q, k, v, **given), atol=1e-5, rtol=1e-5)


def test_gradients_are_right_in_float64(name):
    kernel = make(variant(name), **SHAPES)
    q, k, v = (torch.randn(1, 1, t, 3, dtype=torch.float64, requires_grad=True) for t in (3, 4, 4))
    assert torch.autograd.gradcheck(lambda *qkv: kernel(*qkv, scale=0.7, visible=Visibility(3, 1)), (q, k, v))


def test_grouped_heads_equal_repeated_heads(name):
    blocks = []
    for kernel in (make(variant(name), **SHAPES), Formula(n_head=4)):
        projections = Separate(d_model=32, n_head=4, n_kv_head=2, head_dim=8, bias=False)
        block = CausalSelfAttention(0, 32, 4, 8, kernel, InverseSqrt(8), projections, qk_norm="rms", bias=False)
        for parameter, start in zip(block.parameters(), itertools.count()):
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(start))
        blocks.append(block)
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(blocks[0](x, Given(Visibility(6)))[0], blocks[1](x, Given(Visibility(6)))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mask", [Causal(), Causal(5)])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_future_is_invisible_bitwise(name, position, mask, training):
    model = shaken(tiny_model(variant(name), position=position, mask=mask, smear=True, value_embeddings=True)).train(training)
    idx = torch.randint(11, (3, 16), generator=torch.Generator().manual_seed(1))
    before = model(idx)
    for t in (1, 7, 15):
        changed = idx.clone()
        changed[:, t:] = (changed[:, t:] + 1) % 11
        after = model(changed)
        assert after[:, :t].equal(before[:, :t])
        assert not after[:, t].isclose(before[:, t]).all()


@pytest.mark.parametrize("position", POSITIONS)
def test_a_prefix_is_the_same_in_a_shorter_tensor(name, position):
    model = shaken(tiny_model(variant(name), position=position, n_kv_head=2)).eval()
    idx = torch.randint(11, (2, 16))
    torch.testing.assert_close(model(idx)[:, :9], model(idx[:, :9]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mask", [Causal(), Causal(5)])
@pytest.mark.parametrize("position", POSITIONS)
def test_cached_equals_full_for_any_chunking(name, position, mask, scale):
    model = shaken(tiny_model(variant(name), position=position, mask=mask, scale=scale, n_kv_head=2, smear=True, value_embeddings=True)).eval()
    idx = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(2))
    full = model(idx)
    for chunks in ([1] * 16, [16], [5, 11], [7, 1, 1, 7], [1, 15]):
        cache = model.new_cache()
        cached = torch.cat([model(part, cache) for part in idx.split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(cached, full, atol=1e-4, rtol=1e-5)


def test_rows_of_a_batch_are_independent(name):
    model = shaken(tiny_model(variant(name))).eval()
    idx = torch.randint(11, (3, 10))
    changed = idx.clone()
    changed[1] = (changed[1] + 1) % 11
    assert model(changed)[[0, 2]].equal(model(idx)[[0, 2]])


def test_dropout_acts_while_training_and_is_silent_in_eval(name):
    kernel = make(variant(name, dropout=0.5), **SHAPES)
    q, k, v = inputs(8)
    given = {"scale": 0.5, "visible": Visibility(8)}
    assert not kernel.train()(q, k, v, **given).equal(kernel(q, k, v, **given))
    torch.testing.assert_close(kernel.eval()(q, k, v, **given), Formula(n_head=4)(q, k, v, **given), atol=1e-5, rtol=1e-5)
    draws = torch.stack([kernel.train()(q, k, v, **given) for _ in range(600)]).mean(0)
    assert (draws - kernel.eval()(q, k, v, **given)).abs().mean() < 0.1


def test_the_weights_a_model_returns_are_those_of_its_layers(name):
    model = shaken(tiny_model(variant(name), n_kv_head=2)).eval()
    idx = torch.randint(11, (2, 6))
    logits, weights = model(idx, return_weights=True)
    assert logits.equal(model(idx)) and [a.shape for a in weights] == [(2, 4, 6, 6)] * 2
    cache = model.new_cache()
    model(idx[:, :4], cache)
    _, last = model(idx[:, 4:], cache, return_weights=True)
    torch.testing.assert_close(last[1], weights[1][:, :, 4:], atol=1e-5, rtol=1e-5)
