"""Which of Q, K and V are their own projection of the input?"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedLinear(nn.Module):
    """Several linear maps of one input, computed as one product: (B, T, C) -> (B, T, sum of rows).

    `parts` names the maps and their output widths. Each part keeps an identity of its own: it is initialised from its
    own stream and orthogonalised apart by Muon, as if it were a matrix by itself.
    """

    def __init__(self, d_model: int, parts: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = dict(parts)
        rows = sum(self.parts.values())
        self.weight = nn.Parameter(torch.empty(rows, d_model))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Projections(nn.Module):
    """(B, T, C) -> q (B, H, T, D), k (B, G, T, D), v (B, G, T, D)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def heads(x: Tensor, n: int) -> Tensor:
    """(B, T, n·D) -> (B, n, T, D)."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class Separate(Projections):
    """Three projections of their own. Vaswani et al. 2017, arXiv:1706.03762; G < H: Ainslie et al. 2023, arXiv:2305.13245."""

    def __init__(self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = n_head, n_kv_head
        self.widths = [n_head * head_dim, n_kv_head * head_dim, n_kv_head * head_dim]
        self.qkv = FusedLinear(d_model, dict(zip("qkv", self.widths, strict=True)), bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).split(self.widths, dim=-1)
        return heads(q, self.n_head), heads(k, self.n_kv_head), heads(v, self.n_kv_head)
