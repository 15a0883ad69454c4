"""How large are scores? One small object per answer: s = scale · q kᵀ.

A scale is a float, or a tensor that broadcasts to (B, H, T, 1). All of them see the number of visible keys; most ignore
it.
"""

import math

import torch
from torch import Tensor, nn

from softattn_lm.attention.visibility import Visibility


class Scale(nn.Module):
    """`forward(visible)` answers with the factor on q kᵀ."""

    def forward(self, visible: Visibility) -> float | Tensor:
        raise NotImplementedError


class InverseSqrt(Scale):
    """1/√D: q kᵀ has variance D when q and k have unit variance. Vaswani et al. 2017, arXiv:1706.03762, section
    3.2.1.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.value = head_dim**-0.5

    def forward(self, visible: Visibility) -> float:
        return self.value


class InverseDim(Scale):
    """1/D: right when q and k become aligned as the width grows. Yang et al. 2022, arXiv:2203.03466."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.value = 1.0 / head_dim

    def forward(self, visible: Visibility) -> float:
        return self.value


class Constant(Scale):
    """A number that does not depend on D; 1 is no scale at all."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = float(value)

    def forward(self, visible: Visibility) -> float:
        return self.value


class LearnedPerHead(Scale):
    """g_h/√D with one learned gain per head, 1 at the start: it begins as InverseSqrt."""

    def __init__(self, head_dim: int, n_head: int) -> None:
        super().__init__()
        self.root = head_dim**-0.5
        self.gain = nn.Parameter(torch.ones(n_head))

    def forward(self, visible: Visibility) -> Tensor:
        return (self.gain * self.root)[:, None, None]  # (H, 1, 1)


class LogLength(Scale):
    """s_h · log(n)/√D, n = keys visible to the query, s_h learned per head: Scalable-Softmax.

    A row with more keys needs larger scores to stay as sharp. s starts at 1/log(context), so that the last row of a
    full context begins as InverseSqrt; `initial` overrides it. A query that reads one key has scale 0 and weight 1.

    Nakanishi 2025, arXiv:2501.19399.
    """

    def __init__(self, head_dim: int, n_head: int, context: int, initial: float | None = None) -> None:
        super().__init__()
        self.root = head_dim**-0.5
        start = 1.0 / math.log(max(context, 2)) if initial is None else initial
        self.gain = nn.Parameter(torch.full((n_head,), start))

    def forward(self, visible: Visibility) -> Tensor:
        # A padding row reads nothing, and log 0 would make its query infinite.
        length = visible.count().clamp_min(1).to(self.gain.dtype).log()  # (T, 1)
        return (self.gain * self.root)[:, None, None] * length  # (H, T, 1)
