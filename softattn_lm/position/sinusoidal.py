"""x_i += [sin(i·ω_m), cos(i·ω_m)], ω_m = base^(−2m/C): fixed waves. Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

Sines fill the first half of the width and cosines the second; the paper interleaves them, which is a renaming of
components.
"""

import torch
from torch import Tensor

from softattn_lm.errors import UserError
from softattn_lm.position.base import Places, Position, checked_base


class Sinusoidal(Position):
    """Added to embeddings like a learned table, and like it re-encoded beyond the context. Raises UserError on an odd
    width.
    """

    absolute = True
    like: Tensor

    def __init__(self, d_model: int, base: float = 10000.0) -> None:
        super().__init__()
        if d_model % 2:
            raise UserError(
                f"position=sinusoidal needs pairs of components and model.d_model={d_model} is odd; type an even one"
            )
        self.d_model, self.base = d_model, checked_base(base)
        self.register_buffer("like", torch.empty(0), persistent=False)  # knows the model's device and dtype

    def embed(self, places: Places) -> Tensor:
        where = places if isinstance(places, Tensor) else torch.arange(places.start, places.stop)
        pair = torch.arange(0, self.d_model, 2, dtype=torch.float64) / self.d_model
        angle = where.to("cpu", torch.float64)[..., None] * self.base**-pair  # (..., T, C/2)
        return torch.cat((angle.sin(), angle.cos()), dim=-1).to(self.like)
