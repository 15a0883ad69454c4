"""Causal softmax attention in bfloat16 by plain matrix products, for training on a CPU.

torch's fused kernel has a backward pass there that takes seven times as long as these products at 64 tokens and twice
at 256. Rows go in blocks of ROWS, each with the keys that it may read, and as many heads at once as a cache holds.
Scores, softmax and sums over blocks are in float32; A is kept for the backward pass, (T, T) / 2 numbers a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128
AT_ONCE = 2**18  # numbers of A
LONGEST = 1024  # beyond, A is large and the fused kernel is as fast


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these are trained on in bfloat16 on a CPU, by their type or by autocast, eagerly."""
    if q.device.type != "cpu" or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
    trained = q.requires_grad or k.requires_grad or v.requires_grad
    return cast == torch.bfloat16 and trained and q.shape == k.shape == v.shape and q.shape[2] <= LONGEST


def causal_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """(B, H, T, D) each -> y of the same shape, bfloat16. Differentiable once."""
    y: Tensor = _CausalProducts.apply(*(x.to(torch.bfloat16) for x in (q, k, v)), scale)
    return y


class _CausalProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        shape = q.shape
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))  # (B·H, T, D)
        y, kept = torch.empty_like(v), []
        with torch.autocast("cpu", enabled=False):
            wide_q, wide_k = q.float(), k.float()
            for heads, rows, keys in _blocks(*q.shape[:2]):
                scores = torch.bmm(wide_q[heads, rows], wide_k[heads, keys].mT).mul_(scale)  # (n, ROWS, S)
                corner = scores[:, :, rows]
                corner += torch.full(corner.shape[1:], -torch.inf).triu(1)
                a = torch.softmax(scores, -1).to(q.dtype)
                y[heads, rows] = torch.bmm(a, v[heads, keys])
                kept.append(a)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scale, ctx.shape = scale, shape
        return y.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        dy = dy.reshape(v.shape)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            for (heads, rows, keys), a in zip(_blocks(*q.shape[:2]), kept, strict=True):
                d = dy[heads, rows]
                dv[heads, keys] += torch.bmm(a.mT, d)
                da = torch.bmm(d, v[heads, keys].mT).float()
                wide = a.float()
                # Of softmax: ds = A (dA − sum of dA A), and of the scale.
                ds = torch.ops.aten._softmax_backward_data(da, wide, -1, wide.dtype).mul_(ctx.scale).to(q.dtype)
                dq[heads, rows] = torch.bmm(ds, k[heads, keys])
                dk[heads, keys] += torch.bmm(ds.mT, q[heads, rows])
        dq, dk, dv = (x.view(ctx.shape).to(q.dtype) for x in (dq, dk, dv))
        return dq, dk, dv, None


def _blocks(heads: int, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """(heads, rows, keys that they may read), all pairs."""
    rows = min(ROWS, length)
    at_once = max(1, AT_ONCE // (rows * length))
    for head in range(0, heads, at_once):
        for row in range(0, length, rows):
            end = min(length, row + rows)
            yield slice(head, head + at_once), slice(row, end), slice(0, end)
