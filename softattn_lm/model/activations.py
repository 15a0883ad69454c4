"""GELU by tanh and ReLU², in few operations where a CPU trains.

GELU's tanh approximation is x σ(z) with z = 2 √(2/π) (x + 0.044715 x³), as 1 + tanh(u) = 2 σ(2u), and torch computes a
logistic function in a seventh of the time of a tanh. Its derivative is σ(z) (1 + x z' (1 − σ(z))).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from softattn_lm.attention.root_mean_square import trains_on_cpu

A = 2 * math.sqrt(2 / math.pi)
B = 0.044715 * A


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = x.square().mul_(B).add_(A).mul_(x).sigmoid_()
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, s = ctx.saved_tensors
        slope = x.square().mul_(3 * B).add_(A).mul_(x)  # x z'
        return slope.addcmul_(slope, s, value=-1).add_(1).mul_(s).mul_(dy)


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


def gelu_tanh(x: Tensor) -> Tensor:
    """Differentiable once where `trains_on_cpu`."""
    if not trains_on_cpu(x):
        return F.gelu(x, approximate="tanh")
    y: Tensor = _GELU.apply(x)
    return y


def squared_relu(x: Tensor) -> Tensor:
    """Differentiable once where `trains_on_cpu`."""
    if not trains_on_cpu(x):
        return F.relu(x).square()
    y: Tensor = _SquaredReLU.apply(x)
    return y
