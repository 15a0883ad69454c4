"""A bias is asked for in tiles; so is its gradient."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias, TensorBias
from softattn_lm.errors import UserError


def learned(bias: Bias | None) -> dict[str, Tensor]:
    """The attributes of a bias that want a gradient: slopes, a table, all (H, T, S) values.

    Raises UserError if its tiles depend on something learned that is no attribute of it: that gradient would be lost.
    """
    if bias is None or not torch.is_grad_enabled():
        return {}
    found = {name: value for name, value in vars(bias).items() if isinstance(value, Tensor) and value.requires_grad}
    rest = with_tensors(bias, {name: value.detach() for name, value in found.items()})
    if rest.tile(slice(0, 1), slice(0, 1)).requires_grad:
        raise UserError(
            f"attention=blockwise cannot reach what {type(bias).__name__} learns: keep each learned tensor as an "
            "attribute of the bias itself, or use attention=formula"
        )
    return found


def with_tensors(bias: Bias, tensors: dict[str, Tensor]) -> Bias:
    """The same bias over other tensors."""
    twin = copy.copy(bias)
    vars(twin).update(tensors)
    return twin


class BiasGradient:
    """Collects the gradient of a bias from the gradients of its tiles."""

    def __init__(self, bias: Bias, tensors: dict[str, Tensor]) -> None:
        self.whole = isinstance(bias, TensorBias)
        self.leaves = {name: value.detach().requires_grad_() for name, value in tensors.items()}
        self.twin = with_tensors(bias, self.leaves)
        self.sums = [torch.zeros_like(leaf) for leaf in self.leaves.values()]

    def add(self, queries: slice, keys: slice, gradient: Tensor) -> None:
        """gradient: (H, t, s), of one tile."""
        if self.whole:
            # Through autograd each tile would make a gradient as large as all tiles together.
            part = self.sums[0][:, queries, keys]
            part += gradient.sum_to_size(part.shape)
            return
        with torch.enable_grad():
            tile = self.twin.tile(queries, keys)
        gradients = torch.autograd.grad(tile, list(self.leaves.values()), gradient.to(tile.dtype), allow_unused=True)
        for total, part in zip(self.sums, gradients, strict=True):
            if part is not None:
                total += part
