"""A softmax over the k best matches only: A = softmax(s + M') with M' = −∞ for every key outside the k largest scores.

Gupta et al. 2021, arXiv:2106.06899. k ≥ T is the softmax, k = 1 the hard lookup (here with the gradient of its one
term: 0).
"""

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.formula import softmax_weights
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError


class TopK(AttentionKernel):
    """Which keys are kept jumps as scores cross; in between, gradients are exact. Raises UserError for k < 1."""

    reads_every_key = False

    def __init__(self, top: int = 8, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        if top < 1:
            raise UserError(f"attention.top={top} keeps no key; type attention.top=1 or more")
        self.top = top

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
        a = softmax_weights(q, k, scale, visible, bias)
        best = a.detach().topk(min(self.top, a.shape[-1]), dim=-1).indices
        kept = a * torch.zeros_like(a).scatter(-1, best, 1.0)
        # The softmax over the kept keys is the full softmax divided by what they hold; a row with nothing to read holds
        # 0.
        return kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
