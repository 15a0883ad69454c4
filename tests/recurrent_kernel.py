"""The smallest kernel with a state: y_i = Σ_{j<=i} (scale · q_i·k_j) v_j, and the state is the sum of k_j v_jᵀ."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel, State
from softattn_lm.attention.visibility import Visibility

WHY = "a state forgets which key brought what"


class Summing(AttentionKernel):
    """Weights are the bare scores, negative ones too."""

    recurrent = True
    rows_sum_to = "anything"
    refuses: ClassVar[dict[str, str]] = dict.fromkeys(("window", "sinks", "documents", "bias", "dropout"), WHY)

    def __init__(self) -> None:
        super().__init__()

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
        assert not visible.cuts, "a window came to a kernel that refuses it"
        return (q * scale @ k.mT).masked_fill(~visible.dense(), 0.0)

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State | None,
        *,
        scale: float | Tensor,
        features: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        before = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state["sum"]
        inside = (q * scale @ k.mT).tril() @ v
        return q * scale @ before + inside, {"sum": before + k.mT @ v}


class Normed(Summing):
    """With a norm behind it, and 0.5 of what comes out of it."""

    normed = True
    head_gain = 0.5
