"""A short causal convolution: y_t = Σ_j w_j ⊙ x_{t−j}, j < width, behind each of the projections to q, k and v.

So et al. 2021, arXiv:2109.08668 (width 3); Yang et al. 2024, arXiv:2406.06484, who need it where keys write to a state.
They start from random weights; here w_0 = 1 and the others 0, and no activation follows, so that a model with it starts
as the same model without.
"""

import torch
from torch import Tensor, nn

from softattn_lm.attention.cache import KVCache, behind
from softattn_lm.errors import UserError


class ShortConvolution(nn.Module):
    """q (B, H, T, D), k and v (B, G, T, D) -> the same shapes; a weight per token back, head and component.

    Raises UserError for a width of 1 or less, which sees no other token.
    """

    def __init__(self, layer: int, width: int, n_head: int, n_kv_head: int, head_dim: int) -> None:
        super().__init__()
        if width < 2:
            raise UserError(
                f"model.short_conv={width} is a width in tokens and sees no other one; type model.short_conv=4, or 0 "
                "for none"
            )
        self.layer = layer
        self.q = nn.Parameter(_identity(width, n_head, head_dim))
        self.k = nn.Parameter(_identity(width, n_kv_head, head_dim))
        self.v = nn.Parameter(_identity(width, n_kv_head, head_dim))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """places (B, T): positions in packed documents, which do not see each other."""
        name = f"convolution {self.layer} "
        return (
            _convolved(q, self.q, places, name + "q", cache),
            _convolved(k, self.k, places, name + "k", cache),
            _convolved(v, self.v, places, name + "v", cache),
        )


def _identity(width: int, n: int, head_dim: int) -> Tensor:
    """(width, n, 1, D): by how many tokens back, head, (token,) component."""
    weight = torch.zeros(width, n, 1, head_dim)
    weight[0] = 1.0
    return weight


def _convolved(x: Tensor, weight: Tensor, places: Tensor | None, name: str, cache: KVCache | None) -> Tensor:
    rows = behind(x, len(weight) - 1, name, cache)  # (B, n, width − 1 + T, D)
    y = weight[0] * x
    for back in range(1, len(weight)):
        end = rows.shape[-2] - back
        earlier = rows[..., end - x.shape[-2] : end, :]
        if places is not None:
            earlier = earlier * (places >= back)[:, None, :, None]
        y = y + weight[back] * earlier
    return y
