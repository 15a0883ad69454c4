"""Matrices and norms for a few rows, one token of each sample: what a decode step spends its time on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

PACK_FROM = 2**17  # entries of a float32 matrix: below, oneDNN's call costs more than its layout gains


class Matrix:
    """x -> x Wᵀ + b for a few rows x, in the precision of the weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, batch: int) -> None:
        weight, self.bias, self.dtype = weight.detach(), None if bias is None else bias.detach(), weight.dtype
        rows, columns = weight.shape
        # Read along the longer side.
        self.weight = weight.t().contiguous() if rows >= columns else weight.contiguous().t()  # (in, out)
        self.half, self.packed = weight.dtype.itemsize == 2, None
        if weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and _worth_packing(weight, batch):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), batch)

    def __call__(self, x: Tensor) -> Tensor:
        if self.half:
            x = x.to(self.dtype)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def into(self, row: Tensor, x: Tensor) -> None:
        """The same, written to `row`."""
        if self.half or self.packed is not None:
            row.copy_(self(x))
        elif self.bias is None:
            torch.mm(x, self.weight, out=row)
        else:
            torch.addmm(self.bias, x, self.weight, out=row)

    def onto(self, stream: Tensor, x: Tensor) -> Tensor:
        """The same, added to `stream`."""
        if self.half or self.packed is not None:
            return stream.add_(self(x))
        return (stream if self.bias is None else stream.add_(self.bias)).addmm_(x, self.weight)


def _worth_packing(weight: Tensor, batch: int) -> bool:
    """Whether oneDNN's own layout is faster: in float32 for several rows, in bfloat16 always, with AVX-512."""
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and batch > 1 and weight.numel() >= PACK_FROM


def norm(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What a LayerNorm or RMSNorm computes, without the module."""
    given = dict(module.named_parameters())
    gain, bias = (given[name].detach().to(dtype) if name in given else None for name in ("weight", "bias"))
    if isinstance(module, nn.LayerNorm):
        shape, eps = module.normalized_shape, module.eps
        return lambda x: torch.layer_norm(x, shape, gain, bias, eps)
    assert isinstance(module, nn.RMSNorm)
    return rms(module.normalized_shape[0], module.eps, gain, dtype, device)


def rms(
    width: int, eps: float | None, gain: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """x / √(mean(x²) + eps) · gain over the last dimension: four operations where torch's own, on a CPU, is eight."""
    least = torch.full((1,), torch.finfo(dtype).eps if eps is None else eps, dtype=dtype, device=device)

    def normed(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * torch.addcmul(least, length, length, value=1 / width).rsqrt_()
        return x if gain is None else x * gain

    return normed
