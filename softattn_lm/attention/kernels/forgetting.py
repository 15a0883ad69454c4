"""A softmax that forgets: A = softmax(s_ij + Σ_{j < l ≤ i} log f_l), f_l = σ(w_h · x_l + b_h) for head h and token l.

Lin et al. 2025, arXiv:2503.02130. f = 1 everywhere is the softmax, a constant f = e^(−m) is ALiBi with slope m. What is
cached of a token beside its key and value is log f, one number per head.

The sum is a difference c_i − c_j of sums from the first key on, which grow with the text while those that matter stay
small: c is in float64 (on MPS, which has none, in float32), and differences are made before anything is rounded.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.bias import ALL, Bias
from softattn_lm.attention.bias_gradient import learned
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.blockwise import tiled_attention
from softattn_lm.attention.kernels.formula import softmax_weights
from softattn_lm.attention.projections import heads
from softattn_lm.attention.tiles import of_rows
from softattn_lm.attention.visibility import Visibility

FORMULA_UP_TO = 256  # keys: below, a loop over tiles costs more than the matrix


class Decay:
    """c_i − c_j, and another bias if there is one. sums: c of shape (..., H, S). Tiles are (..., H, t, s)."""

    def __init__(self, sums: Tensor, past: int, dtype: torch.dtype, bias: Bias | None) -> None:
        self.sums, self.past, self.dtype, self.bias = sums, past, dtype, bias

    def tile(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        mine, theirs = self.sums[..., self.past :][..., queries], self.sums[..., keys]
        decay = (mine[..., :, None] - theirs[..., None, :]).to(self.dtype)
        if self.bias is None:
            return decay
        added = self.bias.tile(queries, keys).to(self.dtype)  # (H, t, s)
        # The heads of several rows of a batch may stand behind each other.
        return decay + added.repeat(decay.shape[-3] // added.shape[0], 1, 1)


class Forgetting(AttentionKernel):
    """w starts like every matrix and b at 0, so that f is about 1/2."""

    grouped = True
    refuses: ClassVar[dict[str, str]] = {
        "sinks": "how much of the first tokens is forgotten depends on the tokens that the cache has dropped behind "
        "them; use mask=sliding, or mask=causal"
    }

    def __init__(self, d_model: int, n_head: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.gate = nn.Linear(d_model, n_head)
        nn.init.zeros_(self.gate.bias)

    def features(self, x: Tensor) -> Tensor:
        """(B, T, C) -> log f of shape (B, H, T, 1), in float32 or better."""
        gate = heads(self.gate(x), self.gate.out_features)
        return F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))

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
        decay = Decay(summed(features), visible.past, _precise(q), bias)  # (B, H, T, S)
        return softmax_weights(q, k, scale, visible, decay)

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
        # The gradient of a tile reaches what is an attribute of its bias, and not what a bias within it learns.
        if visible.new == 1 or visible.total <= FORMULA_UP_TO or learned(bias):
            k, v = expand_groups(k, q.shape[1]), expand_groups(v, q.shape[1])
            return super().forward(q, k, v, scale=scale, visible=visible, bias=bias, features=features)
        dropout = self.dropout if self.training else 0.0
        return tiled_decay(q * scale, k, v, summed(features), visible, bias, dropout)


def summed(features: Tensor | None) -> Tensor:
    """log f (B, H, S, 1) -> c of shape (B, H, S), the sum of those up to a token, itself included."""
    assert features is not None, "attention=forgetting reads features"
    precise = torch.float32 if features.device.type == "mps" else torch.float64
    return features[..., 0].to(precise).cumsum(-1)


def tiled_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    visible: Visibility,
    bias: Bias | None = None,
    dropout: float = 0.0,
    query_block: int | None = None,
    key_block: int | None = None,
) -> Tensor:
    """(B, H, T, D), scaled, (B, G, S, D), (B, G, S, D), (B, H, S) -> (B, H, T, D) in memory linear in T.

    A bias is the same for all rows of a batch and a decay is not: rows become heads, or one by one where they differ in
    their mask as well.
    """
    if visible.documents is not None and len(q) > 1:
        rows = [slice(row, row + 1) for row in range(len(q))]
        parts = [
            tiled_decay(q[row], k[row], v[row], sums[row], of_rows(visible, row), bias, dropout, query_block, key_block)
            for row in rows
        ]
        return torch.cat(parts)
    decay = Decay(sums.flatten(0, 1), visible.past, _precise(q), bias)
    q_rows, k_rows, v_rows = (x.flatten(0, 1)[None] for x in (q, k, v))
    y = tiled_attention(q_rows, k_rows, v_rows, 1.0, visible, decay, None, None, dropout, query_block, key_block)
    return y.view(q.shape).to(v.dtype)  # a scale that is learned is in float32


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
