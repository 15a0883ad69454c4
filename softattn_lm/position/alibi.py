"""s_ij −= m_h · (i − j): attention with linear biases, m_h = 2^(−8h/H) for h = 1 … H.

Press et al. 2021, arXiv:2108.12409. Where H is not a power of two the slopes follow the authors' code: those of the
largest power of two below H, then every second one of twice that power.
"""

import math

import torch
from torch import Tensor

from softattn_lm.attention.bias import DistanceBias
from softattn_lm.attention.visibility import Visibility
from softattn_lm.position.base import Position


def alibi_slopes(n_head: int) -> list[float]:
    """H = 8: 1/2, 1/4 … 1/256. H = 6: 1/4, 1/16, 1/64, 1/256, then 1/2, 1/8."""
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + between[: n_head - power]


class ALiBi(Position):
    """Adds to scores only; the distance is that of the text, also when the cache has dropped keys."""

    slopes: Tensor

    def __init__(self, n_head: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(n_head)), persistent=False)

    def bias(self, visible: Visibility) -> DistanceBias:
        return DistanceBias(self.slopes, visible)
