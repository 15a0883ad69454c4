"""`blockwise` against the formula, tile by tile, and what it promises beyond it: linear memory, any block size."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from softattn_lm.attention.bias import DistanceBias, TensorBias
from softattn_lm.attention.kernels.auto import Auto
from softattn_lm.attention.kernels.blockwise import Blockwise
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.tiles import plan
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

B, H, G, D = 2, 4, 2, 8
LENGTHS = (1, 5, 31, 33, 127, 129, 137)
MASKS = ("causal", "window", "sinks", "dropped", "documents", "documents and sinks")
OPTIONS = {
    "plain": {},
    "cap": {"soft_cap": 2.0},
    "one": {"sink": "one"},
    "cap and learned sink": {"soft_cap": 3.0, "sink": "learned"},
}


def visible(mask, new, past):
    if mask == "causal":
        return Visibility(new, past)
    if mask == "window":
        return Visibility(new, past, window=9)
    if mask == "sinks":
        return Visibility(new, past, window=9, sinks=3)
    if mask == "dropped":  # the cache let go of 50 keys between the sinks and the window
        return Visibility(new, past, window=9, sinks=2, start=past + 50 if past > 2 else past)
    total = new + past
    index = torch.arange(total)
    documents = torch.stack((index // 40, index // 7))
    documents[0, total - total // 4 :] = -1
    places = torch.stack((index % 40, index % 7))
    found = Visibility(new, past, documents=documents, places=places)
    return found if mask == "documents" else replace(found, window=5, sinks=2)


def made(kind, options, blocks=(None, None)):
    sizes = {"query_block": blocks[0], "key_block": blocks[1]} if kind is Blockwise else {}
    kernel = kind(H, **options, **sizes).double()
    if options.get("sink") == "learned":
        torch.nn.init.normal_(kernel.sink, generator=torch.Generator().manual_seed(3))
    return kernel


def values_and_gradients(kernel, seen, scale, bias):
    """y, and the gradients of q, k, v and of whatever scale, sink and bias learn; grouped heads."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = leaf(B, H, seen.new, D), leaf(B, G, seen.total, D), leaf(B, G, seen.total, D)
    leaves = [q, k, v]
    factor = 0.4
    if scale != "number":
        factor = leaf(H, 1 if scale == "head" else seen.new, 1)
        leaves.append(factor)
    added = None
    if bias == "tensor":
        leaves.append(leaf(H, seen.new, seen.total))
        added = TensorBias(leaves[-1])
    elif bias == "slopes":
        leaves.append(leaf(H))
        added = DistanceBias(leaves[-1], seen)
    leaves += kernel.parameters()
    if not kernel.grouped:
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    y = kernel(q, k, v, scale=factor, visible=seen, bias=added)
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, D)).sum(), leaves)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_all_gradients_equal_the_formula_at_lengths_around_blocks(mask, options):
    scales, biases = itertools.cycle(("number", "head", "query")), itertools.cycle(("none", "tensor", "slopes", "none"))
    for new, past in itertools.product(LENGTHS, (0, 3, 40)):
        seen, scale, bias = visible(mask, new, past), next(scales), next(biases)
        fast = values_and_gradients(made(Blockwise, OPTIONS[options], (32, 48)), seen, scale, bias)
        slow = values_and_gradients(made(Formula, OPTIONS[options]), seen, scale, bias)
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10, msg=f"T={new} past={past} {scale} {bias}")


@pytest.mark.parametrize("mask", MASKS)
def test_no_block_size_changes_the_result(mask):
    seen = visible(mask, 37, 5)
    options = OPTIONS["cap and learned sink"]
    slow = values_and_gradients(made(Formula, options), seen, "query", "tensor")
    for blocks in ((1, 1), (2, 7), (5, 3), (7, 41), (36, 42), (37, 43), (100, 1), (1, 100)):
        fast = values_and_gradients(made(Blockwise, options, blocks), seen, "query", "tensor")
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10, msg=str(blocks))


def test_rows_of_a_batch_are_taken_in_parts_without_changing_the_result(monkeypatch):
    seen = visible("documents", 20, 0)
    whole = values_and_gradients(made(Blockwise, {}, (8, 8)), seen, "number", "tensor")
    monkeypatch.setattr("softattn_lm.attention.kernels.blockwise.CPU_TILE", 1)  # one row at a time
    parts = values_and_gradients(made(Blockwise, {}, (8, 8)), seen, "number", "tensor")
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_agree_with_finite_differences_over_several_tiles(options):
    kernel = made(Blockwise, OPTIONS[options], (2, 3))
    q, k, v = (torch.randn(1, h, t, 3, dtype=torch.float64, requires_grad=True) for h, t in ((H, 5), (G, 7), (G, 7)))
    bias = torch.randn(H, 5, 7, dtype=torch.float64, requires_grad=True)
    parameters = list(kernel.parameters())

    def function(q, k, v, bias, *_):
        return kernel(q, k, v, scale=0.7, visible=Visibility(5, 2, window=4), bias=TensorBias(bias))

    assert torch.autograd.gradcheck(function, (q, k, v, bias, *parameters))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made, the backward pass included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def largest(kernel, seen):
    q, k, v = (torch.randn(1, 2, t, 8, requires_grad=True) for t in (seen.new, seen.total, seen.total))
    bias = DistanceBias(torch.rand(2, requires_grad=True), seen)
    with Largest() as mode:
        kernel(q, k, v, scale=0.5, visible=seen, bias=bias).sum().backward()
    return mode.elements


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0, "sink": "learned"}, {"dropout": 0.1}])
def test_no_tensor_grows_with_the_square_of_the_length(options):
    index = torch.arange(1024)[None]
    masks = [Visibility(1024), Visibility(1024, window=100, sinks=2), Visibility(1024, documents=index // 300)]
    for seen in masks:
        assert largest(Blockwise(2, **options, query_block=64, key_block=64), seen) <= 2 * 1024 * 8
    assert largest(Formula(2), masks[0]) >= 2 * 1024**2  # the probe sees what it is there to see


def computed(seen, query_block, key_block):
    """Which pairs of query and key are computed, (T, S), and which of them without a mask."""
    done, full = (torch.zeros(seen.new, seen.total, dtype=torch.bool) for _ in range(2))
    for block in plan(seen, query_block, key_block):
        for tile in block.tiles:
            assert not done[block.queries, tile.keys].any()  # never twice
            done[block.queries, tile.keys] = True
            full[block.queries, tile.keys] = not tile.partial
    return done, full


@pytest.mark.parametrize(("mask", "past"), itertools.product(MASKS, (0, 40)))
def test_every_readable_pair_is_computed_once_and_maskless_tiles_hide_nothing(mask, past):
    for query_block, key_block in ((1, 1), (4, 6), (16, 16), (200, 13)):
        seen = visible(mask, 70, past)
        done, full = computed(seen, query_block, key_block)
        read = seen.dense().expand(B, 1, 70, 70 + past).flatten(0, 1)
        assert done[read.any(0)].all()
        assert read.all(0)[full].all()


def test_tiles_that_nobody_reads_are_skipped():
    # The triangle, and the upper corners of its 8 tiles on the diagonal.
    assert computed(Visibility(64), 8, 8)[0].sum() == 64 * 65 // 2 + 8 * 28
    assert computed(Visibility(64, window=8), 8, 8)[0].sum() <= 64 * 15
    sinks = computed(Visibility(64, window=8, sinks=2), 8, 8)[0]
    assert sinks[-8:, :2].all() and not sinks[-8:, 2:40].any()
    packed = torch.arange(64)[None] // 16
    assert computed(Visibility(64, documents=packed), 8, 8)[0].sum() == 4 * (64 + 2 * 64)


@pytest.mark.parametrize("kernel", [Blockwise(H, query_block=8, key_block=8), Blockwise(H, sink="one", soft_cap=4.0)])
def test_keys_that_are_not_numbers_leave_what_cannot_read_them_untouched(kernel):
    q, k, v = (torch.randn(B, H, 40, D) for _ in range(3))
    poisoned = k.clone()
    poisoned[:, :, 21:] = torch.nan
    before, after = (kernel(q, x, v, scale=0.5, visible=Visibility(40)) for x in (k, poisoned))
    assert after[:, :, :21].equal(before[:, :, :21]) and after[:, :, 21:].isnan().all()


def test_scores_of_a_million_give_numbers_and_the_gradient_of_the_formula():
    q, k, v = (torch.randn(B, H, 50, D, dtype=torch.float64) for _ in range(3))
    results = []
    for kernel in (Blockwise(H, query_block=16, key_block=16), Formula(H)):
        leaves = [x.clone().requires_grad_() for x in (q * 1e6, k, v)]
        y = kernel(*leaves, scale=1.0, visible=Visibility(50))
        results.append([y, *torch.autograd.grad(y.sum() + y.square().sum(), leaves)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-7, rtol=1e-7)


def test_half_precision_is_summed_in_float32():
    q, k = torch.zeros(1, 1, 2000, D, dtype=torch.bfloat16), torch.zeros(1, 1, 2000, D, dtype=torch.bfloat16)
    v = torch.ones(1, 1, 2000, D, dtype=torch.bfloat16)
    y = Blockwise(1, query_block=256, key_block=16)(q, k, v, scale=1.0, visible=Visibility(2000))
    assert y.dtype == torch.bfloat16 and (y == 1).all()


def test_autocast_does_not_round_the_sums():
    q, k, v = (torch.randn(1, H, 100, D) for _ in range(3))
    kernel = Blockwise(H)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kernel(q, k, v, scale=0.5, visible=Visibility(100))
    assert inside.equal(kernel(q, k, v, scale=0.5, visible=Visibility(100)))


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    kernel = Blockwise(1, dropout=0.5, query_block=3, key_block=4).double().train()

    def dropped(q, k, v):
        torch.manual_seed(5)
        return kernel(q, k, v, scale=0.5, visible=Visibility(10))

    q, k, v = (torch.randn(1, 1, 10, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(dropped, (q, k, v))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_values_and_gradients_on_cuda_are_those_of_the_cpu(dropout):
    results = []
    for device in ("cuda", "cpu"):
        kernel = Blockwise(H, dropout, soft_cap=3.0, sink="one", query_block=16, key_block=48).to(device).eval()
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(B, H, 137, D, dtype=torch.float64, generator=generator).to(device) for _ in range(3)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        seen = Visibility(137, window=20, sinks=2, device=device)
        if dropout:
            torch.manual_seed(0)
            y, again = (kernel.train()(*leaves, scale=0.5, visible=seen) for _ in range(2))
            assert not y.equal(again) and y.isfinite().all()
            kernel.eval()
        y = kernel(*leaves, scale=0.5, visible=seen)
        results.append([x.cpu() for x in (y, *torch.autograd.grad(y.square().sum(), leaves))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_a_bias_whose_learned_part_is_out_of_reach_is_refused():
    hidden = torch.randn(H, 6, 6, requires_grad=True)

    class Closed:
        def tile(self, queries=slice(None), keys=slice(None)):
            return hidden[:, queries, keys]

    q = torch.randn(1, H, 6, D)
    with pytest.raises(UserError, match="Closed learns"):
        Blockwise(H)(q, q, q, scale=1.0, visible=Visibility(6), bias=Closed())


@pytest.mark.parametrize("setting", ["query_block", "key_block"])
def test_a_block_of_nothing_is_refused(setting):
    with pytest.raises(UserError, match=f"attention.{setting}=0"):
        Blockwise(H, **{setting: 0})


CHOICES = [
    ({}, Visibility(4096), False, "sdpa"),
    ({}, Visibility(4096, window=256), False, "blockwise"),
    ({}, Visibility(256, window=200), False, "sdpa"),
    ({"soft_cap": 30.0}, Visibility(4096), False, "blockwise"),
    ({"sink": "learned"}, Visibility(64), False, "formula"),
    ({"sink": "one"}, Visibility(1, 4096), False, "formula"),
    ({}, Visibility(4096), True, "blockwise"),
    ({"dropout": 0.1}, Visibility(1024), False, "blockwise"),
    ({}, Visibility(1, 4096), False, "sdpa"),
]


@pytest.mark.parametrize(("options", "seen", "biased", "name"), CHOICES)
def test_auto_says_what_it_chose_and_why(options, seen, biased, name):
    choice = Auto(H, 512, **options).choose(seen, "cpu", biased)
    assert choice.name == name and choice.reason


def test_auto_takes_flex_on_cuda_only_where_flex_honours_what_is_asked():
    capped = {"soft_cap": 30.0}
    assert Auto(H, 512, **capped).choose(Visibility(512), "cuda").name == "flex"
    assert Auto(H, 512, dropout=0.1, **capped).choose(Visibility(512), "cuda").name == "blockwise"
    assert Auto(H, 512).choose(Visibility(512), "cuda").name == "sdpa"
    assert Auto(H, 512).choose(Visibility(512, window=64), "cuda").name == "flex"


@pytest.mark.parametrize("mask", MASKS)
def test_auto_equals_the_formula_whatever_it_chooses(mask):
    names = set()
    for options, new in itertools.product(OPTIONS.values(), (7, 137)):
        seen = visible(mask, new, 3)
        kernel = Auto(H, 512, **options).double()
        if options.get("sink") == "learned":
            kernel.load_state_dict(made(Formula, options).state_dict())
        fast = values_and_gradients(kernel, seen, "query", "tensor")
        slow = values_and_gradients(made(Formula, options), seen, "query", "tensor")
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
        names.add(kernel.choice)
    assert {"formula", "blockwise"} <= names
