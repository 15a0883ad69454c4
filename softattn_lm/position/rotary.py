"""Queries and keys turn with their position: pair m of token i by the angle i · base^(−2m/R), so q·k sees i − j only.

Su et al. 2021, arXiv:2104.09864. The two halves of a head are the pairs (the layout of GPT-NeoX and Llama).
"""

import torch
from torch import Tensor

from softattn_lm.errors import UserError
from softattn_lm.position.base import Places, Position, Rotation, checked_base


class Rotary(Position):
    """fraction: share of the head's components that turn; the rest carries no position. Raises UserError on an odd
    count.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context: int, base: float = 10000.0, fraction: float = 1.0) -> None:
        super().__init__()
        rotated = round(head_dim * fraction)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise UserError(
                f"position=rotary turns components in pairs, and fraction {fraction} of a head of {head_dim} is "
                f"{rotated}; "
                "type an even model.head_dim, or position.fraction between 0 and 1 that gives an even count"
            )
        self.rotated, self.base = rotated, checked_base(base)
        cos, sin = self._angles(torch.arange(context))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        if places.is_meta:  # a trial build, which asks for the shapes of weights only
            nothing = torch.empty(0)
            return nothing, nothing
        # float32 angles would be off by 4e-4 at position 1,000 and by 4e-2 at 100,000.
        pair = torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated
        angle = places.to("cpu", torch.float64)[..., None] * self.base**-pair  # (..., T, R/2)
        return angle.cos().float(), angle.sin().float()

    def rotation(self, places: Places) -> Rotation:
        if isinstance(places, Tensor):
            if places.ndim == 2:
                places = places[:, None]  # (B, 1, T): the same for all heads
            if int(places.max()) < len(self.cos):
                return Rotation(self.cos[places], self.sin[places])
            cos, sin = self._angles(places)
            return Rotation(cos.to(self.cos), sin.to(self.sin))
        if places.stop <= len(self.cos):
            return Rotation(self.cos[places.start : places.stop], self.sin[places.start : places.stop])
        cos, sin = self._angles(
            torch.arange(places.start, places.stop)
        )  # beyond the table, which long sampling reaches
        return Rotation(cos.to(self.cos), sin.to(self.sin))
