"""The difference of two softmaxes, in which what both read of irrelevant keys cancels: A = softmax(s₁) − λ softmax(s₂),

    λ = exp(λq₁ · λk₁) − exp(λq₂ · λk₂) + λ_init        λ_init = 0.8 − 0.6 · e^(−0.3 · layer), layers from 0

with s₁ of the even components of q and k and s₂ of the odd ones. Ye et al. 2024, arXiv:2410.05258; behind the kernel
each head's y is divided by its root mean square and multiplied by 1 − λ_init.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.formula import softmax_weights
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

STD = 0.1  # of the vectors of λ at the start


class Differential(AttentionKernel):
    """Rows sum to 1 − λ. The scale is that of the policy for both halves (the paper's is 1/√(D/2)), and both get the
    whole position bias.

    Every second component, not the first D/2 of them: rotation turns components m and m + R/2 together, so that with R
    a multiple of 4 (a model of other positions is refused) the halves hold whole pairs, and the even half turns as a
    head of width D/2 would.

    λq₁, λk₁, λq₂, λk₂ have D/2 components each and start at N(0, 0.1²), drawn by the number of the layer alone.
    Raises UserError for an odd D.
    """

    grouped = True
    rows_sum_to: ClassVar[str] = "anything"
    turned_by: ClassVar[int] = 4
    normed: ClassVar[bool] = True

    def __init__(self, layer: int, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        if head_dim % 2:
            raise UserError(
                f"attention=differential splits a head in two halves, and model.head_dim={head_dim} is odd; type an "
                f"even model.head_dim, such as {head_dim + 1}"
            )
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.head_gain = 1.0 - self.initial
        generator = torch.Generator().manual_seed(layer)
        drawn = (STD * torch.randn(head_dim // 2, generator=generator) for _ in range(4))
        self.q_first, self.k_first, self.q_second, self.k_second = (nn.Parameter(vector) for vector in drawn)
        self.fused = SDPA()

    def share(self) -> Tensor:
        """λ, a scalar."""
        first, second = self.q_first.dot(self.k_first), self.q_second.dot(self.k_second)
        return first.exp() - second.exp() + self.initial

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
        first = softmax_weights(q[..., ::2], k[..., ::2], scale, visible, bias)
        second = softmax_weights(q[..., 1::2], k[..., 1::2], scale, visible, bias)
        return first - self.share().to(q.dtype) * second

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        if self.training and self.dropout:
            # What is dropped are entries of A: two fused calls would draw for each of its two terms.
            k, v = expand_groups(k, q.shape[1]), expand_groups(v, q.shape[1])
            return super().forward(q, k, v, scale=scale, visible=visible, bias=bias)
        # Zeros in the place of the other half: fused kernels want queries, keys and values of one width.
        even = (torch.arange(q.shape[-1], device=q.device) % 2 == 0).to(q.dtype)
        first = self.fused(q * even, k, v, scale=scale, visible=visible, bias=bias)
        second = self.fused(q * (1 - even), k, v, scale=scale, visible=visible, bias=bias)
        return first - self.share().to(q.dtype) * second
