"""Large products of float32 training on a CPU, by another library than torch asks by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from softattn_lm.attention import linear as linear_module
from softattn_lm.attention.linear import Linear, linear, serves
from softattn_lm.commands.bare_training import Shape, gpt2_style, llama_style

pytestmark = pytest.mark.skipif(not linear_module.AVAILABLE, reason="no oneDNN of an x86 processor")


def given(*shape: int, inner: int = 384, outer: int = 320) -> list[torch.Tensor]:
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
    ("shape", "inner", "outer"),
    [((6, 99), 384, 320), ((2, 3, 99), 385, 321), ((999,), 1536, 64), ((1, 9000), 97, 83)],
)
def test_y_and_every_gradient_are_rounded_about_as_torchs_own(shape, inner, outer, biased):
    x, weight, bias, dy = given(*shape, inner=inner, outer=outer)
    bias = bias if biased else None
    assert serves(x.clone().requires_grad_(), weight, bias)
    exact = through(F.linear, x, weight, bias, dy, torch.float64)
    theirs = through(F.linear, x, weight, bias, dy)
    ours = through(linear, x, weight, bias, dy)
    again = through(linear, x, weight, bias, dy)
    for a, b, c, d in zip(ours, theirs, exact, again, strict=True):
        assert a.shape == c.shape and torch.equal(a, d)
        assert (a - c).square().mean().sqrt() < 3 * (b - c).square().mean().sqrt()
        torch.testing.assert_close(a, c, atol=2e-6 * c.abs().max().item(), rtol=0)


def test_rows_need_not_lie_one_behind_the_other():
    x, weight, bias, _ = given(8, 100, 2)
    apart = x.permute(2, 1, 0, 3)[..., ::2].requires_grad_()  # (2, 100, 8, 192)
    weight = weight[:, ::2].requires_grad_()
    found = torch.autograd.grad(linear(apart, weight, bias).sum(), (apart, weight))  # dy is one number, spread
    exact = torch.autograd.grad(F.linear(apart.double(), weight.double(), bias.double()).sum(), (apart, weight))
    assert serves(apart, weight, bias)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-5)


def test_a_gradient_of_a_gradient_is_torchs():
    x, weight, bias, dy = given(600)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = []
    for compute in (linear, F.linear):
        (dx,) = torch.autograd.grad(compute(x, weight, bias), x, dy, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_what_is_counted_is_what_is_counted_of_torchs_own():
    """As `ablate` does, for "executed"."""
    x, weight, bias, dy = given(600)
    counts = []
    for compute in (linear, F.linear):
        with FlopCounterMode(display=False) as counter:
            compute(x.requires_grad_(), weight.requires_grad_(), bias).backward(dy)
        counts.append(counter.get_total_flops())
    assert counts == [6 * 600 * 384 * 320] * 2


def test_gradients_of_each_sample_are_torchs():
    x, weight, bias, _ = given(600)

    def loss(weight, x):
        return linear(x, weight, bias).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x.view(2, 300, -1))
    torch.testing.assert_close(each.sum(0), torch.func.grad(loss)(weight, x), atol=0.1, rtol=1e-5)


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
    # It would read the neighbours of such a bias, and has words of its own for shapes that do not fit.
    strided = torch.stack((bias, bias + 1000), 1)[:, 0]
    for other in (strided, bias[:1].expand(320), bias[0]):
        assert not serves(x, trained, other)
        torch.testing.assert_close(linear(x, trained, other), F.linear(x, trained, other.contiguous()))
    assert not serves(x.flatten(), trained, bias) and not serves(x, trained.to_sparse(), bias)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        linear(x[:, 1:], trained, bias)
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
    shape = Shape(2, 384, 256, 2)
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
