"""A variant is a kernel q, k, v -> y, and every kernel is a matrix of weights applied to values: y = A(q, k) v."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

# What a recurrent kernel remembers of the past: named tensors whose first dimension is B.
State = dict[str, Tensor]


class AttentionKernel(nn.Module):
    """y = A(q, k) v. `weights` defines A; `forward` computes y, perhaps without forming A.

    A constructor that needs a shape (n_head, head_dim, d_model, context, layer) asks for it by name, and the model
    passes it.

    grouped: True if `forward` takes (B, G, S, D) keys and values itself; otherwise the block repeats them to H heads.
    refuses: what this kernel cannot honour, of `window`, `sinks`, `documents`, `bias`, `dropout`, each with the reason.
    rows_sum_to: "one"; "at most one" (some weight goes nowhere); "anything".
    reads_scores: False if A does not depend on q and k, whose projections then get no gradient.
    reads_every_key: False if a visible key may get no weight and no gradient.
    trains_on: device types that have a backward pass, if not every one has.
    differentiable: False if A jumps, so that gradients are those of `surrogate(q, k, ...)` in the place of A.
    recurrent: True if what decoding remembers is a state of constant size: the kernel has `recur`, the cache keeps none
    of its layer's keys and values, and it reads all of the past, however long. state_products: how many products of D²
    numbers a token and head then cost: one to write the state, one to read it.
    turned_by: of how many components a rotation must turn a multiple, so that what this kernel compares apart holds
    whole pairs.
    normed: True if the block divides each head's y by its root mean square over D, with a learned gain, and multiplies
    it by `head_gain`; the norm stands behind the kernel, so that y = A v holds for the kernel itself.
    """

    grouped: ClassVar[bool] = False
    refuses: ClassVar[dict[str, str]] = {}
    rows_sum_to: ClassVar[str] = "one"
    reads_scores: ClassVar[bool] = True
    reads_every_key: ClassVar[bool] = True
    trains_on: ClassVar[tuple[str, ...] | None] = None
    differentiable: ClassVar[bool] = True
    recurrent: ClassVar[bool] = False
    state_products: ClassVar[int] = 2
    turned_by: ClassVar[int] = 2
    normed: ClassVar[bool] = False
    head_gain: float = 1.0

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise UserError(
                f"attention.dropout={dropout} is not a probability below 1; type attention.dropout=0.1, or 0 for none"
            )
        self.dropout = dropout

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
        """(B, H, T, D), (B, H, S, D) -> A of shape (B, H, T, S), without dropout; rows with nothing to read are 0.

        scale: from the scale policy, a float or broadcastable to (B, H, T, 1). bias: added to scores, (H, T, S) in
        tiles. features: (B, H, S, E), what `features` made of the block's input.
        """
        raise NotImplementedError

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
        """(B, H, T, D), (B, H, S, D), (B, H, S, D) -> y = A v of shape (B, H, T, D). Dropout on A while training."""
        a = self.weights(q, k, scale=scale, visible=visible, bias=bias, features=features)
        return F.dropout(a, self.dropout, self.training) @ v

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
        """(B, H, T, D) of T new tokens behind what `state` has read -> y (B, H, T, D) and the state behind them.

        Of recurrent kernels only. state: None before the first token. features: (B, H, T, E) of the new tokens.
        """
        raise NotImplementedError

    def explain(self, visible: Visibility, device: str, biased: bool) -> str | None:
        """Which implementation computes y for this mask on this device ("cpu", "cuda", "mps"), if there is a choice,
        and why.
        """
        return None

    def features(self, x: Tensor) -> Tensor | None:
        """(B, T, C) -> (B, H, T, E), cached like keys, or None if this kernel reads q and k only."""
        return None
