"""The same A as `formula`, computed by torch's fused scaled_dot_product_attention without keeping the (T, S) matrix.

Dao et al. 2022, arXiv:2205.14135, is what runs underneath where the device has it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.formula import softmax_weights
from softattn_lm.attention.products import causal_products, serves
from softattn_lm.attention.visibility import Visibility


class SDPA(AttentionKernel):
    """`is_causal` only for a plain triangle: with cached keys torch's flag would align it to the wrong corner."""

    grouped = True

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)

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
        return softmax_weights(q, k, scale, visible, bias)

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
        if isinstance(scale, Tensor) or scale <= 0:
            # torch hides keys by −∞ before it scales: times 0 that is NaN, and times a negative number it reads them.
            q, scale = q * scale, 1.0
        causal = visible.is_plain_causal and bias is None
        if causal and not (self.training and self.dropout) and serves(q, k, v):
            return causal_products(q, k, v, scale)
        mask = None if causal or visible.reads_all else visible.dense()  # (T, S)
        if bias is not None:
            added = bias.tile().to(q.dtype)  # (H, T, S)
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
