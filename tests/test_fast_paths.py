"""Faster ways to compute the same: in bfloat16 by products, ReLU² in one go, a decode step of fixed shapes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from softattn_lm.attention import products
from softattn_lm.attention.kernels import sdpa
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.projections import SharedKV
from softattn_lm.attention.scale import LearnedPerHead, LogLength
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.activations import squared_relu, tanh_gelu
from softattn_lm.model.decode import Decode
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.generate import generate
from softattn_lm.model.graphed import GraphedDecode
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.learned import Learned
from tests.models import tiny_model


def tensors(length: int, heads: int = 3, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, heads, length, width, generator=generator, dtype=torch.float64) for _ in range(4)]


def through(compute, given, dy, dtype) -> list[torch.Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in given]
    y = compute(*leaves)
    return [x.double() for x in (y, *torch.autograd.grad(y, leaves, dy.to(dtype)))]


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("length", [1, 7, 64, 130, 300])  # of several blocks, and a last one that is short
def test_products_err_as_much_as_the_fused_kernel_in_bfloat16(length):
    *given, dy = tensors(length)
    exact = through(fused, given, dy, torch.float64)
    theirs = through(fused, given, dy, torch.bfloat16)
    ours = through(lambda q, k, v: products.causal_products(q, k, v, 0.25), given, dy, torch.bfloat16)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).abs().max() < max(1e-2, 2 * (b - c).abs().max())
        assert (a - c).square().mean().sqrt() < 1e-4 + 1.2 * (b - c).square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_any_scale_sdpa_averages_what_it_may_read(dtype):
    *given, dy = tensors(16)
    v, n = given[2], torch.arange(1, 17)[:, None]
    y, dq, dk, dv = through(lambda q, k, v: SDPA()(q, k, v, scale=0.0, visible=Visibility(16)), given, dy, dtype)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    close(y, v.cumsum(2) / n)
    close(dv, (dy / n).flip(2).cumsum(2).flip(2))
    assert not dq.any() and not dk.any()


def test_scores_are_not_rounded_under_autocast():
    """A score of 100.3 in bfloat16 is 100.5: its softmax would be a fifth off."""
    *given, dy = (10 * x for x in tensors(24))
    plain = through(lambda q, k, v: products.causal_products(q, k, v, 0.25), given, dy, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        cast = through(lambda q, k, v: products.causal_products(q, k, v, 0.25), given, dy, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_sdpa_takes_products_when_it_trains_in_bfloat16_on_a_cpu_and_only_then(monkeypatch):
    taken = []
    monkeypatch.setattr(
        sdpa, "causal_products", lambda *given: taken.append(given[0].dtype) or products.causal_products(*given)
    )
    q, k, v, _ = (x.float() for x in tensors(8))
    half, kernel, visible = q.bfloat16().requires_grad_(), SDPA(), Visibility(8)
    kernel(half, k.bfloat16(), v.bfloat16(), scale=0.25, visible=visible)
    assert len(taken) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel(q.requires_grad_(), k, v, scale=0.25, visible=visible).dtype == torch.bfloat16
    assert len(taken) == 2
    kernel(q, k, v, scale=0.25, visible=visible)  # float32
    SDPA(dropout=0.5).train()(half, k.bfloat16(), v.bfloat16(), scale=0.25, visible=visible)
    kernel(half, k.bfloat16(), v.bfloat16(), scale=0.25, visible=Visibility(8, window=2))
    kernel(half, k.bfloat16(), torch.cat((v, v), -1).bfloat16(), scale=0.25, visible=visible)  # wider values
    with torch.no_grad():
        kernel(half, k.bfloat16(), v.bfloat16(), scale=0.25, visible=visible)
    assert len(taken) == 2


def test_squared_relu_is_bit_for_bit_what_torch_puts_together():
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0
    dy = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    found = []
    for compute in (squared_relu, lambda x: F.relu(x).square()):
        leaf = x.clone().requires_grad_()
        y = compute(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, dy)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_the_gelu_that_is_trained_on_a_cpu_and_its_slope_are_torchs(dtype, allowed):
    x = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([0.0, -1e4, 1e4]))).to(dtype)
    dy = torch.randn(len(x), generator=torch.Generator().manual_seed(1)).to(dtype)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = tanh_gelu(leaf), F.gelu(exact, approximate="tanh")
    assert type(y.grad_fn).__name__ == "_TanhGELUBackward" and y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=allowed, rtol=allowed)
    found, slope = (torch.autograd.grad(z, of, dy.to(z.dtype))[0] for z, of in ((y, leaf), (expected, exact)))
    torch.testing.assert_close(found.double(), slope, atol=allowed, rtol=allowed)
    with torch.no_grad():
        assert torch.equal(tanh_gelu(x), F.gelu(x, approximate="tanh"))
    assert type(tanh_gelu(exact).grad_fn).__name__ == "GeluBackward0"


def model(**more) -> DecoderLM:
    settings = {"n_kv_head": 2, "qk_norm": "rms_gain", "value_embeddings": True, "embed_norm": True}
    return tiny_model(vocab_size=31, context=24, **settings | more).eval()


@pytest.mark.parametrize("more", [{}, {"position": Learned, "norm": "layer", "bias": True, "n_kv_head": 4}])
def test_a_step_of_fixed_shapes_writes_what_generate_writes(more):
    writer = GraphedDecode(made := model(**more), batch=2)
    prompt = [5, 9, 2]
    ours = writer.write(torch.tensor([prompt, prompt]), 20)
    again = writer.write(torch.tensor([prompt, prompt]), 20)  # buffers still hold the first text
    theirs = [ids[0] for ids in generate(made, prompt, max_new_tokens=20, temperature=0)]
    assert ours[0].tolist() == ours[1].tolist() == theirs and torch.equal(ours, again)
    assert len(set(theirs)) > 2


REFUSED = {
    "attention=sdpa": {"attention": Formula},
    "projections=separate": {"projections": SharedKV},
    "window": {"mask": Causal(window=4)},
    "position=alibi": {"position": ALiBi},
    "scale=learned": {"scale": LearnedPerHead},
    "log_length": {"scale": LogLength},
    "smear": {"smear": True},
    "output_gate": {"output_gate": "head"},
    "short_conv": {"short_conv": 3},
    "value_residual": {"value_residual": True},
}


@pytest.mark.parametrize(("named", "more"), REFUSED.items())
def test_a_step_of_fixed_shapes_refuses_what_it_does_not_know_and_names_it(named, more):
    with pytest.raises(UserError) as refused:
        GraphedDecode(tiny_model(**more))
    assert named in str(refused.value) and str(refused.value).endswith("type graph=false")


def test_generate_refuses_a_graph_for_what_it_does_not_know():
    plain = tiny_model(context=8)
    list(generate(plain, [5], max_new_tokens=7, graph=True))
    with pytest.raises(UserError, match=r"graph=true .* context of 8 tokens.* 9; type max_new_tokens=7 and cache=true"):
        next(generate(plain, [5], max_new_tokens=8, graph=True))  # the cache would have to roll
    with pytest.raises(UserError, match="cache=true, or graph=false"):
        next(generate(plain, [5], max_new_tokens=2, graph=True, use_cache=False))
    for more in ({"smear": True}, {"mask": Causal(window=4)}, {"short_conv": 3}):
        with pytest.raises(UserError, match=r"knows attention=sdpa .*; type graph=false"):
            list(generate(tiny_model(context=8, **more), [5], max_new_tokens=3, graph=True))


@pytest.mark.parametrize("more", [{}, {"position": Learned, "norm": "layer", "n_kv_head": 4}, {"final_cap": 2.0}])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_step_of_fixed_shapes_goes_on_behind_a_prompt_as_every_other_way_does(monkeypatch, more, temperature):
    made = model(**more)
    write = partial(generate, made, [5, 9, 2], max_new_tokens=20, temperature=temperature, n=3, seed=2)
    expected = list(write())
    taken = []
    step = GraphedDecode.__call__
    monkeypatch.setattr(
        GraphedDecode, "__call__", lambda self, ids: taken.append(self.position.item()) or step(self, ids)
    )
    assert list(write(graph=True)) == expected and len({ids[0] for ids in expected}) > 2
    assert taken == list(range(3, 22))


@pytest.mark.parametrize("batch", [1, 3])
def test_logits_of_a_step_of_fixed_shapes_are_those_of_a_plan(batch):
    made = model(final_cap=2.0).double()
    caches, tokens = [made.new_cache() for _ in range(2)], torch.randint(31, (batch, 12))
    with torch.inference_mode():
        for cache in caches:
            made(tokens[:1, :4], cache)  # one text with which all begin
        flat, graphed = Decode(made, caches[0], batch, 12), GraphedDecode(made, batch)
        graphed.resume(caches[1])
        for token in tokens[:, 4:].unbind(1):
            torch.testing.assert_close(graphed(token), flat(token), atol=1e-9, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_generate_with_a_graph_writes_what_it_writes_on_a_cpu():
    made = model(context=64)
    write = partial(generate, made, [5, 9, 2], max_new_tokens=40, temperature=0, n=2)
    expected = list(write())
    made.to("cuda")
    assert expected == list(write(graph=True))


def test_a_small_step_is_decoded_by_one_thread_and_leaves_their_number_as_it_was(monkeypatch):
    model = tiny_model().eval()
    cache = model.new_cache()
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]), cache)
        plan = Decode(model, cache, 1, 16)
    seen, step = [], plan._step
    monkeypatch.setattr(plan, "_step", lambda ids: (seen.append(torch.get_num_threads()), step(ids))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            plan(torch.tensor([1]))
            assert torch.get_num_threads() == 2
            monkeypatch.setattr(plan, "alone", False)
            plan(torch.tensor([1]))
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


@pytest.mark.parametrize(("more", "alone"), [({}, True), ({"vocab_size": 70_000}, False), ({"context": 20_000}, False)])
def test_what_a_large_vocabulary_or_a_long_text_costs_is_shared_by_all_threads(more, alone):
    model = tiny_model(**more).eval()
    cache = model.new_cache()
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]), cache)
        assert Decode(model, cache, 1, model.context).alone is alone
