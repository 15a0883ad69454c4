"""What is added to scores before the softmax, made in tiles so that no kernel is forced to hold (H, T, S) of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from softattn_lm.attention.visibility import Visibility

ALL = slice(None)


class Bias(Protocol):
    """`tile(queries, keys)`: that part of the bias, (H, t, s)."""

    def tile(self, queries: slice = ALL, keys: slice = ALL) -> Tensor: ...


class TensorBias:
    """A bias that somebody has written out: (H, T, S). Gradients reach the tensor."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def tile(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        return self.values[:, queries, keys]


class DistanceBias:
    """−slope_h · (i − j): the farther back a key, the less it counts. slopes: (H,)."""

    def __init__(self, slopes: Tensor, visible: Visibility) -> None:
        self.slopes, self.visible = slopes, visible

    def tile(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        # The distance itself and not j alone: slope · j loses the difference of neighbours far into a text.
        distance = self.visible.distance(queries, keys).to(self.slopes.dtype)
        return -self.slopes[:, None, None] * torch.clamp(distance, min=0)
