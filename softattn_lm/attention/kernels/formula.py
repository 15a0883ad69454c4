"""The definition, written out: A = softmax(s + M), s = scale · q kᵀ + bias, M = 0 where a key may be read and −∞ elsewhere.

Vaswani et al. 2017, arXiv:1706.03762, equation 1. Forms the whole (T, S) matrix: read it, and use `sdpa` for speed.
"""

import torch
from torch import Tensor

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility


def softmax_weights(q: Tensor, k: Tensor, scale: float | Tensor, visible: Visibility, bias: Tensor | None) -> Tensor:
    """(B, H, T, D), (B, H, S, D) -> (B, H, T, S); rows sum to 1 and hidden keys have weight exactly 0."""
    scores = scale * (q @ k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible.dense(), -torch.inf)
    # Half-precision scores are summed in float32: a row of 1000 weights in bfloat16 would not sum to 1.
    precise = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=precise).to(q.dtype)


class Formula(AttentionKernel):
    """Scores, mask, softmax, weighted average: any floating dtype up to float64."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        return softmax_weights(q, k, scale, visible, bias)
