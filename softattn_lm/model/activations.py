"""ReLU² and tanh GELU with a backward pass of one product or two, for training."""

from __future__ import annotations

import math
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


# 1 + tanh(u) is 2 sigmoid(2u), and torch's sigmoid takes a sixth of the time of its tanh: x sigmoid(z), z = a x + b x³.
A = 2 * math.sqrt(2 / math.pi)
B = 0.044715 * A


class _TanhGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        z = x.square().mul_(B).add_(A).mul_(x)
        s = z.sigmoid()
        # Of x s: s + x s (1 − s) (a + 3 b x²) = s (1 + w − s w), where w = x dz/dx = 3 z − 2 a x.
        w = z.mul_(3).add_(x, alpha=-2 * A)
        ctx.save_for_backward(w.addcmul_(s, w, value=-1).add_(1).mul_(s))
        return s.mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return dy * slope


def tanh_gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), and its derivative made with it, where it is trained on
    a CPU; there differentiable once. Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    trained = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
    if not trained or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return F.gelu(x, approximate="tanh")
    y: Tensor = _TanhGELU.apply(x)
    return y
