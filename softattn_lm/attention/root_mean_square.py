"""x / rms(x) along the last axis, with a backward pass of four operations.

y = x r,  r = (mean(x²) + ε)^(−1/2);  dx = r (dy − y mean(dy y)).    Zhang and Sennrich 2019, arXiv:1910.07467

torch's own is as fast forwards, and on a CPU its derivative, put together of small operations, takes two to four times
as long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        r = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, r = ctx.saved_tensors
        along = (dy * y).mean(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1).mul_(r), None


def trains_on_cpu(x: Tensor) -> bool:
    """Whether `x` is what the written out derivatives are for: float32 on a CPU, in a pass that is trained on, eagerly."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def rms_norm(x: Tensor, gain: Tensor | None, eps: float | None) -> Tensor:
    """(..., C) -> the same; eps None: that of the type. Differentiable once where `trains_on_cpu`."""
    if not trains_on_cpu(x):
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    y: Tensor = _RootMeanSquare.apply(x, torch.finfo(x.dtype).eps if eps is None else eps)
    return y if gain is None else y * gain
