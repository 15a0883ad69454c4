"""`flex` against the formula: in values on a CPU, in gradients as well on CUDA."""

import itertools

import pytest
import torch

from softattn_lm.attention.bias import DistanceBias, TensorBias
from softattn_lm.attention.kernels.flex import Flex, block_mask
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

B, H, G = 2, 4, 2
OPTIONS = {"plain": {}, "cap": {"soft_cap": 2.0}, "one": {"sink": "one"}, "both": {"soft_cap": 3.0, "sink": "learned"}}
MASKS = ("causal", "window", "sinks", "dropped", "documents", "documents and sinks")

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: FlexAttention trains nowhere else")


def visible(mask, new, past, device="cpu"):
    total = new + past
    index = torch.arange(total, device=device)
    documents = torch.stack((index // 40, index // 7))
    documents[0, total - total // 4 :] = -1
    packed = {"documents": documents, "places": torch.stack((index % 40, index % 7))}
    options = {
        "causal": {},
        "window": {"window": 9},
        "sinks": {"window": 9, "sinks": 3},
        "dropped": {"window": 9, "sinks": 2, "start": past + 50 if past > 2 else past},
        "documents": packed,
        "documents and sinks": {"window": 5, "sinks": 2, **packed},
    }
    return Visibility(new, past, device=device, **options[mask])


def both(options, mask, new, past, device="cpu", head_dim=16, gradients=False):
    """What `flex` and the formula make of the same: y, and the gradients of everything that learns."""
    seen = visible(mask, new, past, device)
    results = []
    for kind in (Flex, Formula):
        generator = torch.Generator().manual_seed(1)

        def leaf(*shape, generator=generator):
            return torch.randn(*shape, generator=generator).to(device).requires_grad_(gradients)

        q, k, v = leaf(B, H, new, head_dim), leaf(B, G, seen.total, head_dim), leaf(B, G, seen.total, head_dim)
        factor, slopes, values = leaf(H, new, 1), leaf(H), leaf(H, new, seen.total)
        kernel = kind(H, **options).to(device)
        if options.get("sink") == "learned":
            torch.nn.init.constant_(kernel.sink, 0.5)
        wide = (k, v) if kind is Flex else tuple(x.repeat_interleave(H // G, dim=1) for x in (k, v))
        for bias, learned in ((None, []), (TensorBias(values), [values]), (DistanceBias(slopes, seen), [slopes])):
            y = kernel(q, *wide, scale=0.1 * factor, visible=seen, bias=bias)
            results.append([y])
            if gradients:
                leaves = [q, k, v, factor, *learned, *kernel.parameters()]
                results[-1] += torch.autograd.grad((y * torch.linspace(-1, 1, head_dim, device=device)).sum(), leaves)
    return zip(results[:3], results[3:], strict=True)


@pytest.mark.parametrize("mask", MASKS)
def test_values_equal_the_formula_for_every_mask_option_and_bias(mask):
    for options, (new, past) in itertools.product(OPTIONS.values(), ((1, 40), (33, 3), (129, 0))):
        with torch.no_grad():
            for fast, slow in both(options, mask, new, past):
                torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_training_on_a_cpu_is_refused_in_one_sentence_and_inference_is_not():
    kernel = Flex(H)
    q, k, v = (torch.randn(1, H, 5, 8, requires_grad=True) for _ in range(3))
    y = kernel(q, k, v, scale=0.5, visible=Visibility(5))
    with pytest.raises(UserError, match="attention=blockwise") as raised:
        y.sum().backward()
    assert "\n" not in str(raised.value) and "cpu" in str(raised.value)
    assert Flex.trains_on == ("cuda",)


def test_dropout_is_refused_and_not_ignored():
    with pytest.raises(UserError, match=r"dropout=0\.1"):
        Flex(H, dropout=0.1)


def test_layers_share_one_block_mask_and_batches_of_documents_do_not():
    assert block_mask(Visibility(300, window=7)) is block_mask(Visibility(300, window=7))
    assert block_mask(Visibility(300, window=7)) is not block_mask(Visibility(300, window=8))
    packed = [Visibility(300, documents=torch.arange(300)[None] // size) for size in (50, 140)]
    assert block_mask(packed[0]) is block_mask(packed[0]) is not block_mask(packed[1])


def test_blocks_outside_the_window_are_skipped():
    sparse, full = block_mask(Visibility(1024, window=64)), block_mask(Visibility(1024))
    assert sparse.sparsity() > 75 > full.sparsity() > 40


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(("mask", "options"), zip(MASKS, ["both", "cap", "both", "one", "plain", "both"], strict=True))
def test_values_and_gradients_equal_the_formula_on_cuda(mask, options):
    torch.compiler.reset()  # each case compiles anew, and torch stops compiling after 8
    for fast, slow in both(OPTIONS[options], mask, 137, 40, "cuda", gradients=True):
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3)


@pytest.mark.gpu
@on_cuda
def test_memory_on_cuda_does_not_grow_with_the_square_of_the_length():
    peaks = []
    for length in (4096, 8192):
        q, k, v = (torch.randn(1, 8, length, 64, device="cuda", requires_grad=True) for _ in range(3))
        kernel, seen = Flex(8, soft_cap=30.0), Visibility(length, window=256, device="cuda")
        for _ in range(2):  # the first call compiles and makes the block mask
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kernel(q, k, v, scale=0.125, visible=seen).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 3 * peaks[0]
