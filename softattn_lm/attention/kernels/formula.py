"""The definition, written out: A = softmax(s + M), M = 0 where a key may be read and −∞ elsewhere,

    s = scale · q kᵀ                     scores
    s ← c · tanh(s / c)                  with a soft cap c: Riviere et al. 2024 (Gemma 2), arXiv:2408.00118, section 2
    s ← s + bias                         such as ALiBi
    A = e^s / (e^b + Σ e^s)              with a sink of score b per head: a lookup may miss, and rows sum to less than 1

Vaswani et al. 2017, arXiv:1706.03762, equation 1. Forms the whole (T, S) matrix: read it, and use `sdpa` or `blockwise`
for speed.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

Sink = Literal["none", "one", "learned"]


def softmax_weights(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    visible: Visibility,
    bias: Bias | None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """(B, H, T, D), (B, H, S, D) -> (B, H, T, S); hidden keys have weight exactly 0. sink: (H,) scores."""
    scores = scale * (q @ k.transpose(-2, -1))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.tile().to(scores.dtype)
    readable = visible.dense()
    scores = scores.masked_fill(~readable, -torch.inf)
    # Half-precision scores are summed in float32: a row of 1000 weights in bfloat16 would not sum to 1.
    precise = torch.promote_types(scores.dtype, torch.float32)
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1, dtype=precise)[..., :-1].to(q.dtype)
    if not visible.has_empty_rows:
        return torch.softmax(scores, dim=-1, dtype=precise).to(q.dtype)
    # A softmax over nothing would be 0/0, in the gradient as well.
    empty = ~readable.any(-1, keepdim=True)
    a = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1, dtype=precise)
    return a.masked_fill(empty, 0.0).to(q.dtype)


class SoftmaxKernel(AttentionKernel):
    """What the softmax family has in common: dropout, a soft cap and a sink; `weights` is the formula.

    sink: `one` adds 1 to the denominator (softmax-plus-one: b = 0), `learned` adds e^b with one b per head, 0 at first.
    Raises UserError for a cap that is not positive.
    """

    def __init__(self, n_head: int, dropout: float = 0.0, soft_cap: float | None = None, sink: Sink = "none") -> None:
        super().__init__(dropout)
        if soft_cap is not None and not soft_cap > 0:
            raise UserError(
                f"attention.soft_cap={soft_cap} must be above 0, such as attention.soft_cap=50; null for no cap"
            )
        self.soft_cap = soft_cap
        self.sink: Tensor | None
        if sink == "learned":
            self.sink = nn.Parameter(torch.zeros(n_head))
        else:
            self.register_buffer("sink", torch.zeros(n_head) if sink == "one" else None, persistent=False)

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
        return softmax_weights(q, k, scale, visible, bias, self.soft_cap, self.sink)


class Formula(SoftmaxKernel):
    """Scores, mask, softmax, weighted average: any floating dtype up to float64."""

    def __init__(self, n_head: int, dropout: float = 0.0, soft_cap: float | None = None, sink: Sink = "none") -> None:
        super().__init__(n_head, dropout, soft_cap, sink)
