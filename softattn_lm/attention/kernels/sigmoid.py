"""Every key is weighed by itself: A_ij = σ(s_ij − log n_i) for the n_i visible keys of query i, or σ(s_ij) / n_i.

Ramapuram et al. 2024, arXiv:2409.04431, whose b = −log n is of the context and here of the row, so that a row is the
same alone and in a longer text. Divided instead of shifted: Wortsman et al. 2023, arXiv:2309.08586.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

Count = Literal["shift", "divide"]


def visible_scores(q: Tensor, k: Tensor, scale: float | Tensor, visible: Visibility, bias: Bias | None) -> Tensor:
    """s of shape (B, H, T, S), in float32 or better, with bias, and −∞ where a key is hidden."""
    scores = scale * (q @ k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias.tile().to(scores.dtype)
    precise = torch.promote_types(scores.dtype, torch.float32)
    return scores.to(precise).masked_fill(~visible.dense(), -torch.inf)


class Sigmoid(AttentionKernel):
    """count: how n enters. At s = 0 a weight is 1/(n + 1) or 1/(2n), near the average for both. But `shift` lets one of
    many keys be read in full, as a lookup must, and with `divide` no weight exceeds 1/n.

    Raises UserError for another name.
    """

    rows_sum_to: ClassVar[str] = "anything"

    def __init__(self, count: Count = "shift", dropout: float = 0.0) -> None:
        super().__init__(dropout)
        if count not in ("shift", "divide"):
            raise UserError(f"attention.count={count} must be shift or divide; type attention.count=shift")
        self.count = count

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        scores = visible_scores(q, k, scale, visible, bias)
        n = visible.count().clamp_min(1).to(scores.dtype)  # 0 for padding, whose row is 0 anyway
        a = torch.sigmoid(scores - n.log()) if self.count == "shift" else torch.sigmoid(scores) / n
        return a.to(q.dtype)
