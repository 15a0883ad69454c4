"""What dropout must keep: it acts on A, entry by entry, in training only, and changes nothing else.

With v = 1 (the unit matrix) y is A as it was dropped, so that every entry can be looked at: it is 0 or A / (1 − p).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.property import Measure, close, differs, holds, not_tried, same_bits
from softattn_lm.contract.subject import Subject, features, features_of, hidden, inputs, visibilities

P, T = 0.5, 24  # the width of a head is T as well, so that values can be unit vectors


def _seeded(kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, seed: int, **given: Any) -> Tensor:
    torch.manual_seed(seed)
    return kernel(q, k, v, **given)


@holds("dropout acts on A, entry by entry, while training, and is silent in eval")
def dropout_is_for_training(subject: Subject) -> Iterator[Measure]:
    refusal = subject.refusal("dropout")
    if refusal:
        yield not_tried(refusal)
        return
    kernel = subject.kernel(dropout=P, width=T)
    q, k, v = inputs(T, width=T)
    unit = torch.eye(T).expand(*q.shape[:2], T, T)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = features(kernel, T, width=T)
        for mask, visible in visibilities(subject, T, 0):
            given: dict[str, Any] = {"scale": 0.5, "visible": visible, "features": made}
            quiet, a = kernel.eval()(q, k, v, **given), kernel.weights(q, k, **given)
            yield same_bits(quiet, kernel(q, k, v, **given), f"two calls in eval, {mask}")
            yield close(quiet, a @ v, 2e-5, f"eval against the weights, {mask}")
            kernel.train()
            dropped = _seeded(kernel, q, k, unit, 0, **given)  # (B, H, T, T)
            kept = dropped != 0
            yield close(torch.where(kept, dropped, 0.0), torch.where(kept, a / (1 - P), 0.0), 2e-5, f"entries, {mask}")
            share = kept[a > 0].float().mean().item()
            yield Measure(abs(share - (1 - P)), 0.1, f"share of entries that are kept, {mask}")
        causal: dict[str, Any] = {"scale": 0.5, "visible": Visibility(T), "features": made}
        first, second = (_seeded(kernel, q, k, v, seed, **causal) for seed in (0, 1))
        yield differs(first, second, "two draws in training are equal")
        if subject.kernel().reads_every_key and kernel.differentiable:
            yield from _independent(kernel, q, k, unit, causal)


def _independent(
    kernel: AttentionKernel, q: Tensor, k: Tensor, unit: Tensor, given: dict[str, Any]
) -> Iterator[Measure]:
    """Neither whole columns (values) nor whole rows (outputs) are dropped together."""
    half = T // 2
    kept = (_seeded(kernel, q, k, unit, 2, **given) != 0)[:, :, half:, :half]  # a square that every row may read
    for axis, name in ((2, "values"), (3, "outputs")):
        together = kept.all(axis) | (~kept).all(axis)
        yield Measure(together.float().mean().item(), 0.1, f"{name} are dropped, and not weights")
    sums = _seeded(kernel, q, k, torch.ones_like(unit), 2, **given)[:, :, half:]  # (B, H, T/2, T): each row's total
    yield Measure((sums == 0).float().mean().item(), 0.1, "outputs are dropped, and not weights")
    same = (sums - sums[..., :1]).abs().amax().item()
    yield Measure(same, 1e-4, "components of an output are dropped apart")


@holds("with dropout, training hides the future and its backward pass uses the draw of the forward pass")
def dropout_keeps_the_mask(subject: Subject) -> Iterator[Measure]:
    refusal = subject.refusal("dropout") or subject.refusal("training")
    if refusal:
        yield not_tried(refusal)
        return
    kernel = subject.kernel(dropout=P, width=T).train()
    t = T // 2
    with torch.random.fork_rng(devices=[]):
        for mask, visible in visibilities(subject, T, 0):
            given: dict[str, Any] = {"scale": 0.5, "visible": visible}
            q, k, v, x = (x.requires_grad_() for x in (*inputs(T, width=T), hidden(T, width=T)))
            made = features_of(kernel, x)
            y = _seeded(kernel, q, k, v, 0, **given, features=made)
            step = 100.0 * (torch.arange(T) >= t)[:, None]
            later = features_of(kernel, x.detach() + step)
            changed = _seeded(
                kernel, q.detach() + step, k.detach() + step, v.detach() + step, 0, **given, features=later
            )
            yield same_bits(changed[:, :, :t], y[:, :, :t], f"row before {t}, {mask}")
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
            dk, dv, dx = torch.autograd.grad(
                (y[:, :, :t] * g[:, :, :t]).sum(),
                (k, v, x),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            future = [dk[:, :, t:], dv[:, :, t:], dx[:, t:]]
            yield Measure(max(part.abs().max().item() for part in future), 0.0, f"gradient to the future, {mask}")
            (dv,) = torch.autograd.grad((y * g).sum(), v)
            with torch.no_grad():
                unit = torch.eye(T).expand(*q.shape[:2], T, T)
                drawn = _seeded(kernel, q, k, unit, 0, **given, features=made)
            yield close(dv, drawn.transpose(-2, -1) @ g, 2e-5, f"dv is Aᵀ dy for the A that was drawn, {mask}")
