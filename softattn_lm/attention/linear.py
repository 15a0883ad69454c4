"""x Wᵀ + b, for training on a CPU in float32: the same product by another library.

torch multiplies float32 matrices with MKL. For y and dx of a large layer oneDNN, which torch brings along, takes a
tenth less time; for dW it does not, and MKL stays. Rounding errs up to about twice as much: 5e-7 of a typical entry.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

LEAST = 2**26  # multiplications; below, the way through Python costs what the product gains
AVAILABLE = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in), weight (out, in), bias (out,) -> (..., out), as F.linear."""
    if not serves(x, weight, bias):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this is a large product that is trained, eagerly, in float32 on a CPU, of tensors that oneDNN reads as
    torch does: it takes the entries of a bias for neighbours in memory.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or x.device.type != "cpu" or not AVAILABLE:
        return False
    given = [x, weight] if bias is None else [x, weight, bias]
    return (
        x.ndim > 1
        and x.numel() * weight.shape[0] >= LEAST
        and x.shape[-1] == weight.shape[-1]
        and all(z.dtype == torch.float32 and z.layout == torch.strided for z in given)
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and any(z.requires_grad for z in given)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and bool(torch.backends.mkldnn.enabled)
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


if AVAILABLE:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _operations(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        """Of shapes: what torch counts for F.linear."""
        return 2 * math.prod(x) * weight[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        dy = dy.contiguous()
        rows, dx = dy.flatten(0, -2), None
        if of_x:  # where gradients of gradients are asked for, by what torch can differentiate
            dx = dy @ weight if torch.is_grad_enabled() else _product(dy, weight.t(), None)
        return dx, rows.t().mm(x.flatten(0, -2)) if of_weight else None, rows.sum(0) if of_bias else None
