"""The average of what may be read: A_ij = 1/n_i for the n_i visible keys of query i. No lookup at all.

The arm that every table needs as its zero: what attention buys is the distance from here.
"""

from typing import ClassVar

from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility


class Uniform(AttentionKernel):
    """Queries and keys are not read; their projections keep their initial values."""

    refuses: ClassVar[dict[str, str]] = {
        "bias": "it has no scores to add to; use position=rotary, learned, sinusoidal or none"
    }
    reads_scores = False

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
        readable = visible.dense().to(q.dtype)
        a = readable / visible.count().clamp_min(1).to(q.dtype)
        return a.expand(*q.shape[:2], *a.shape[-2:])
