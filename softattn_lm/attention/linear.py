"""x Wᵀ + b, trained in float32 by oneDNN's products where they are faster than those torch takes.

On AMD processors MKL, which torch takes, runs at about nine tenths of oneDNN's rate (2048 x 384 by 384 x 1536 on one core
of a Zen 4: 89 against 103 GFLOP/s). The gradient of W has its operands transposed, which oneDNN is only handed copied:
that one stays torch's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class Linear(nn.Linear):
    """(..., C) -> (..., rows); what nn.Linear computes."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., C), (rows, C), (rows) -> (..., rows). Differentiable once where oneDNN serves."""
    if not serves(x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = _OneDNNLinear.apply(x, weight, bias)
    return y


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether these are trained on in float32, eagerly, on a processor of AMD."""
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    if not plain or not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    # What counts operations knows torch's products only.
    return weight.requires_grad and x.numel() > 0 and _faster() and not is_in_torch_dispatch_mode()


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = _product(dy, weight.t(), None) if ctx.needs_input_grad[0] else None
        dw = rows.t().mm(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@cache
def _faster() -> bool:
    """Whether this is a processor of AMD, under Linux, and torch was built with both libraries."""
    built = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in file)
    except OSError:
        return False
