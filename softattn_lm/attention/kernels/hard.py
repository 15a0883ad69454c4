"""The true dictionary lookup: A is 1 at the best match and 0 elsewhere, the limit of softmax(s / T) as T → 0.

A jumps, so gradients are those of the softmax in its place (straight-through: Bengio et al. 2013, arXiv:1308.3432).
Among equal scores the earliest key is taken.
"""

from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.formula import softmax_weights
from softattn_lm.attention.visibility import Visibility


class Hard(AttentionKernel):
    """y is one of the values. `surrogate` is the softmax whose gradient stands in for A's."""

    differentiable = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)

    def surrogate(
        self, q: Tensor, k: Tensor, *, scale: float | Tensor, visible: Visibility, bias: Bias | None = None
    ) -> Tensor:
        """(B, H, T, S): the softmax weights."""
        return softmax_weights(q, k, scale, visible, bias)

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
        soft = self.surrogate(q, k, scale=scale, visible=visible, bias=bias)
        best = soft.detach().amax(-1, keepdim=True)
        # A row with nothing to read is all zeros and has no best match; the first of several equal ones is the best.
        match = (soft.detach() == best) & (best > 0)
        one_hot = (match & (match.cumsum(-1) == 1)).to(soft.dtype)
        # The difference of equal numbers is exactly 0, so A itself stays exactly 0 and 1.
        return one_hot + (soft - soft.detach())
