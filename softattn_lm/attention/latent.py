"""Keys and values from one small vector per token, which is all that the cache keeps: multi-head latent attention.

    c_j = norm(W_c x_j)        `rank` components, of all heads together
    k_j = [r_j ; W_k c_j],     r_j = rotated(W_r x_j), `rope_dim` components, the same for all heads
    v_j = W_v c_j              q_i = W_q x_i, or W_q norm(W_d x_i) through `q_rank` components of its own

A rotation stands between W_q and W_k and would keep them from becoming one matrix; therefore it has its own few
components. DeepSeek-V2, DeepSeek-AI 2024, arXiv:2405.04434, section 2.1. There a head gets rope_dim components more;
here they are the first ones of its D, so that every kernel and 1/√D fit.
"""

from typing import ClassVar

import torch
from torch import Tensor

from softattn_lm.attention.linear import Linear
from softattn_lm.attention.norm import HeadNorm
from softattn_lm.attention.projections import FusedLinear, Projections, heads
from softattn_lm.errors import UserError


class Latent(Projections):
    """rope_dim: None is half of a head. Raises UserError for a rank below 1 and a rope_dim that is odd or not below
    D.
    """

    late = True
    refuses: ClassVar[dict[str, str]] = {
        "short_conv": "its cache holds no keys and values to convolve",
        "value_residual": "its cache keeps what values of one layer are made of, and nothing of another",
    }

    def __init__(
        self,
        d_model: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        bias: bool,
        rank: int = 64,
        rope_dim: int | None = None,
        q_rank: int | None = None,
        give_to_mlp: bool = False,
    ) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        for name, value in (("rank", rank), ("q_rank", q_rank)):
            if value is not None and value < 1:
                raise UserError(f"projections.{name}={value} must be 1 or more")
        turned = 2 * (head_dim // 4) if rope_dim is None else rope_dim
        if turned % 2 or not 0 <= turned < head_dim:
            raise UserError(
                f"projections.rope_dim={turned} of a head of {head_dim} components must be even and leave some; type "
                f"projections.rope_dim={2 * (head_dim // 4)}"
            )
        self.rank, self.turned = rank, turned
        self.down = FusedLinear(d_model, {"latent": rank} | ({"rotary": turned} if turned else {}), bias=False)
        self.norm = HeadNorm(rank)
        self.up = FusedLinear(rank, {"k": n_kv_head * (head_dim - turned), "v": n_kv_head * head_dim}, bias)
        self.q_down = None if q_rank is None else Linear(d_model, q_rank, bias=False)
        self.q_norm = None if q_rank is None else HeadNorm(q_rank)
        self.q = FusedLinear(d_model if q_rank is None else q_rank, {"q": n_head * head_dim}, bias)

    def write(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q, and per token c and what will be rotated: (B, 1, T, rank + rope_dim)."""
        asking = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        (q,) = self.q(asking)
        latent, *rotary = self.down(x)
        return heads(q, self.n_head), torch.cat((self.norm(latent), *rotary), dim=-1)[:, None]

    def read(self, written: Tensor) -> tuple[Tensor, Tensor]:
        latent, rotary = written[:, 0, :, : self.rank], written[..., self.rank :]  # (B, S, rank), (B, 1, S, R)
        k, v = self.up(latent)
        k, v = heads(k, self.n_kv_head), heads(v, self.n_kv_head)
        return torch.cat((rotary.expand(-1, self.n_kv_head, -1, -1), k), dim=-1), v
