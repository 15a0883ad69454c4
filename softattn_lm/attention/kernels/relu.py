"""Keys that match badly are not read at all: A_ij = max(s_ij, 0)^p / n_i with n_i visible keys of query i, p = 1 or 2.

Wortsman et al. 2023, arXiv:2309.08586; squared: Hua et al. 2022, arXiv:2202.10447. Nothing is exponential and nothing
bounds a row, whose sum grows with the scores.
"""

from typing import ClassVar

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.sigmoid import visible_scores
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError


class ReLU(AttentionKernel):
    """power: p. With p = 1 the gradient jumps where s = 0, and is taken as 0 there. Raises UserError for another p."""

    rows_sum_to: ClassVar[str] = "anything"
    reads_every_key: ClassVar[bool] = False

    def __init__(self, power: int = 1, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        if power not in (1, 2):
            raise UserError(f"attention.power={power} must be 1 or 2; type attention.power=2 for the square")
        self.power = power

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
        a = torch.relu(visible_scores(q, k, scale, visible, bias))
        if self.power == 2:
            a = a.square()
        return (a / visible.count().clamp_min(1).to(a.dtype)).to(q.dtype)
