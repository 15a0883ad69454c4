"""Where is a token? A position policy may add to the input, rotate queries and keys, or add to scores; most do one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from softattn_lm.errors import UserError

if TYPE_CHECKING:
    from softattn_lm.attention.bias import Bias
    from softattn_lm.attention.visibility import Visibility

# Positions of T tokens: `range(start, start + T)`, or (B, T) int64 where packed documents start again at 0.
Places = range | Tensor


@dataclass(frozen=True)
class Rotation:
    """Turns pairs of components by an angle; the first and second half of the rotated components are the pairs.

    cos, sin: (T, R/2) or (B, 1, T, R/2), where R <= D components are rotated and the rest pass.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> the same, rotated."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        turned = [first * cos - second * sin, first * sin + second * cos]
        return torch.cat(turned if 2 * half == x.shape[-1] else [*turned, rest], dim=-1)


def checked_base(base: float) -> float:
    """Of frequencies base^(−2m/R). Raises UserError for one that has no such powers."""
    if not 0 < base < math.inf:
        raise UserError(f"position.base={base} must be a finite number above 0; 10000 is usual")
    return base


class Position(nn.Module):
    """absolute: a token's code depends on where it stands in the context, so that text beyond the context must be
    encoded again; otherwise old keys keep their meaning and the cache rolls."""

    absolute = False

    def embed(self, places: Places) -> Tensor | None:
        """(T, C) or (B, T, C) to add to the embeddings of tokens at these places, or None."""
        return None

    def rotation(self, places: Places) -> Rotation | None:
        """How to turn queries and keys of these tokens, or None."""
        return None

    def bias(self, visible: Visibility) -> Bias | None:
        """What to add to scores, (H, T, S), or None."""
        return None
