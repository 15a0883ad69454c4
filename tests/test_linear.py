"""Large products of float32 training on a CPU, by another library than torch asks by itself."""

import pytest
import torch
import torch.nn.functional as F

from softattn_lm.attention import linear as linear_module
from softattn_lm.attention.linear import Linear, linear, serves
from softattn_lm.commands.bare_training import Shape, gpt2_style, llama_style

pytestmark = pytest.mark.skipif(not linear_module.AVAILABLE, reason="no oneDNN of an x86 processor")


def given(*shape: int, inner: int = 128, outer: int = 160) -> list[torch.Tensor]:
    """x (*shape, inner), weight, bias, dy."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, inner), (outer, inner), (outer,), (*shape, outer)]
    return [torch.randn(s, generator=generator) for s in shapes]


def through(compute, x, weight, bias, dy, dtype=torch.float32):
    leaves = [None if z is None else z.to(dtype).requires_grad_() for z in (x, weight, bias)]
    y = compute(*leaves)
    assert y.dtype == dtype
    return [y.double(), *(z.double() for z in torch.autograd.grad(y, [z for z in leaves if z is not None], dy.to(y)))]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("shape", "inner", "outer"), [((6, 100), 128, 160), ((2, 3, 101), 129, 160), ((700,), 64, 257), ((1, 9000), 31, 37)]
)
def test_y_and_every_gradient_err_as_little_as_torchs_own(shape, inner, outer, biased):
    x, weight, bias, dy = given(*shape, inner=inner, outer=outer)
    bias = bias if biased else None
    assert serves(x.clone().requires_grad_(), weight, bias)
    exact = through(F.linear, x, weight, bias, dy, torch.float64)
    theirs = through(F.linear, x, weight, bias, dy)
    ours = through(linear, x, weight, bias, dy)
    again = through(linear, x, weight, bias, dy)
    for a, b, c, d in zip(ours, theirs, exact, again, strict=True):
        assert a.shape == c.shape and torch.equal(a, d)
        assert (a - c).abs().max() < 2 * (b - c).abs().max() + 1e-6


def test_rows_need_not_lie_one_behind_the_other():
    x, weight, bias, _ = given(8, 64, 2)
    apart = x.permute(2, 1, 0, 3)[..., ::2].requires_grad_()  # (2, 64, 8, 64)
    weight = weight[:, ::2].requires_grad_()
    found = torch.autograd.grad(linear(apart, weight, bias).sum(), (apart, weight))  # dy is one number, spread
    exact = torch.autograd.grad(F.linear(apart.double(), weight.double(), bias.double()).sum(), (apart, weight))
    assert serves(apart, weight, bias)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_has_no_gradient(frozen):
    tensors = [z.requires_grad_(place != frozen) for place, z in enumerate(given(600)[:3])]
    linear(*tensors).square().mean().backward()
    assert [z.grad is None for z in tensors] == [place == frozen for place in range(3)]


def test_it_is_taken_for_large_products_that_are_trained_in_float32_and_for_no_others(monkeypatch):
    x, weight, bias, _ = given(600)
    trained = weight.requires_grad_()
    assert serves(x, trained, bias) and serves(x, trained, None)
    assert not serves(x[:1], trained, bias)  # small
    assert not serves(x.bfloat16(), trained.bfloat16(), bias.bfloat16())
    assert not serves(x.double(), trained.double(), bias.double())
    assert not serves(x, trained.detach(), bias)
    assert not serves(x.to("meta"), trained, bias)
    with torch.no_grad():
        assert not serves(x, trained, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert not serves(x, trained, bias) and linear(x, trained, bias).dtype == torch.bfloat16
    with monkeypatch.context() as without:
        without.setattr(torch.backends.mkldnn, "enabled", False)
        assert not serves(x, trained, bias)
    monkeypatch.setattr(linear_module, "AVAILABLE", False)
    assert type(linear(x, trained, bias).grad_fn).__name__ == "AddmmBackward0"


@pytest.mark.parametrize(("build", "a_layer"), [(gpt2_style, 4), (llama_style, 5)])
def test_every_product_of_a_layer_takes_it(build, a_layer):
    shape = Shape(2, 128, 64, 12)
    model = build(shape)
    loss = model(torch.randint(65, (shape.batch, shape.context))).sum()
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    assert sum(type(node).__name__ == "_LinearBackward" for node in seen) == 2 * a_layer
    assert all(type(part) is Linear for name, part in model.named_modules() if name.endswith((".up", ".down", ".out")))
