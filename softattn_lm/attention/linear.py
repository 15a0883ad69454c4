"""x Wᵀ + b, for training on a CPU in float32: the same product by another library.

torch multiplies float32 matrices with MKL. For y and dx of a layer's shapes oneDNN, which torch brings along, takes a
tenth less time, and leaves y where the next operation finds it; for dW it does not, and MKL stays.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST = 2**23  # multiplications; below, the way through Python costs what the product gains
AVAILABLE = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in), weight (out, in), bias (out,) -> (..., out), as F.linear. Large products are differentiable once
    where they are trained in float32 on a CPU.
    """
    if not serves(x, weight, bias):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not AVAILABLE or not torch.is_grad_enabled() or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    float32 = x.dtype == weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)
    trained = x.requires_grad or weight.requires_grad
    large = x.numel() * weight.shape[0] >= LEAST
    return float32 and trained and large and bool(torch.backends.mkldnn.enabled) and not torch.compiler.is_compiling()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        dy = dy.contiguous()
        rows = dy.flatten(0, -2)
        dx = _product(dy, weight.t(), None) if of_x else None
        return dx, rows.t().mm(x.flatten(0, -2)) if of_weight else None, rows.sum(0) if of_bias else None
