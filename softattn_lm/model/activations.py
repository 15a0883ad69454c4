"""ReLU², with a backward pass of one product, where torch puts five operations together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        r = F.relu(x)
        ctx.save_for_backward(r)
        return r.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (r,) = ctx.saved_tensors
        return torch.mul(r, dy).mul_(2)


def squared_relu(x: Tensor) -> Tensor:
    """Bit for bit what relu(x).square() is, forwards and backwards; differentiable once. A compiler has its own way."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.relu(x).square()
    y: Tensor = _SquaredReLU.apply(x)
    return y
