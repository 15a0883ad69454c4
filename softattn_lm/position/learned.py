"""x_i += P_i, one learned vector per position of the context. Radford et al. 2019 (GPT-2)."""

import torch
from torch import Tensor, nn

from softattn_lm.errors import UserError
from softattn_lm.position.base import Places, Position


class Learned(Position):
    """There is no vector beyond the table: raises UserError for a position >= context."""

    absolute = True

    def __init__(self, context: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(context, d_model))

    def embed(self, places: Places) -> Tensor:
        if isinstance(places, Tensor):
            return self.table[places]  # (B, T, C)
        if places.stop > len(self.table):
            raise UserError(
                f"position=learned knows {len(self.table)} positions and was asked for {places.stop}; "
                f"shorten the text or train with model.context={places.stop}"
            )
        return self.table[places.start : places.stop]  # (T, C)
