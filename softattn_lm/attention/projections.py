"""Which of Q, K and V are their own projection of the input?

    separate   q = x Wq, k = x Wk, v = x Wv        shared_kv  k and v are one: half the cache
    shared_qk  q and k are one: scores of equal rows are symmetric, and every token's best match is itself
    shared_all one projection                      raw        none: q = k = v = x
    identity_v v = x                               low_rank   x A B with A of few columns

Kayyam et al. 2026, arXiv:2606.04032, for the ties; Kitaev et al. 2020, arXiv:2001.04451, for shared_qk; He and Hofmann
2023, arXiv:2311.01906, for identity_v.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from softattn_lm.attention.linear import Linear, linear
from softattn_lm.errors import UserError


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

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, C) -> one (B, T, rows) per part."""
        return linear(x, self.weight, self.bias).split(list(self.parts.values()), dim=-1)


def heads(x: Tensor, n: int) -> Tensor:
    """(B, T, n·D) -> (B, n, T, D)."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class Projections(nn.Module):
    """(B, T, C) -> q (B, H, T, D), k (B, G, T, D), v (B, G, T, D).

    late: k and v, before norm and rotation, are made of fewer numbers by `read`, and the cache can keep those in their
    place; `write` makes them.
    turned: how many components of a head a rotation may turn, the first ones; None for all.
    refuses: settings of a model that these cannot honour, each with the reason.
    give_to_mlp: the model widens each MLP by as many parameters as this saves against `Separate`, so that arms match.
    """

    late: ClassVar[bool] = False
    refuses: ClassVar[dict[str, str]] = {}
    turned: int | None = None

    def __init__(self, n_head: int, n_kv_head: int, give_to_mlp: bool = False) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.give_to_mlp = n_head, n_kv_head, give_to_mlp

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, heads · D) each -> the same in heads."""
        return heads(q, self.n_head), heads(k, self.n_kv_head), heads(v, self.n_kv_head)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of late projections: q and what was written, read."""
        q, written = self.write(x)
        return q, *self.read(written)

    def write(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, C) -> q (B, H, T, D) and what k and v are made of, (B, n, T, E). Of late projections only."""
        raise NotImplementedError

    def read(self, written: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n, S, E) -> k and v, (B, G, S, D) each."""
        return written, written


def _same_heads(name: str, n_head: int, n_kv_head: int) -> None:
    if n_head != n_kv_head:
        raise UserError(
            f"projections={name} makes queries and keys one, so model.n_kv_head={n_kv_head} must equal "
            f"model.n_head={n_head}; type model.n_kv_head=null or model.n_kv_head={n_head}"
        )


def _same_width(name: str, d_model: int, width: int, heads_name: str) -> None:
    if d_model != width:
        raise UserError(
            f"projections={name} uses the input itself, so {heads_name} · head_dim = {width} must equal "
            f"model.d_model={d_model}"
        )


class Separate(Projections):
    """Three projections of their own. Vaswani et al. 2017, arXiv:1706.03762; G < H: Ainslie et al. 2023,
    arXiv:2305.13245.
    """

    def __init__(self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, bias: bool) -> None:
        super().__init__(n_head, n_kv_head)
        self.qkv = FusedLinear(
            d_model, {"q": n_head * head_dim, "k": n_kv_head * head_dim, "v": n_kv_head * head_dim}, bias
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)
        return self.split(q, k, v)


class SharedKV(Projections):
    """What is looked up is what is compared: K = V (before norm and rotation)."""

    late = True

    def __init__(
        self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, bias: bool, give_to_mlp: bool = False
    ) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        self.qkv = FusedLinear(d_model, {"q": n_head * head_dim, "k": n_kv_head * head_dim}, bias)

    def write(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.qkv(x)
        return heads(q, self.n_head), heads(k, self.n_kv_head)


class SharedQK(Projections):
    """A token asks with the vector it answers to: Q = K."""

    def __init__(
        self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, bias: bool, give_to_mlp: bool = False
    ) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        _same_heads("shared_qk", n_head, n_kv_head)
        self.qkv = FusedLinear(d_model, {"k": n_head * head_dim, "v": n_head * head_dim}, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.qkv(x)
        return self.split(k, k, v)


class SharedAll(Projections):
    """One projection for everything: Q = K = V."""

    late = True

    def __init__(
        self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, bias: bool, give_to_mlp: bool = False
    ) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        _same_heads("shared_all", n_head, n_kv_head)
        self.qkv = FusedLinear(d_model, {"k": n_head * head_dim}, bias)

    def write(self, x: Tensor) -> tuple[Tensor, Tensor]:
        (k,) = self.qkv(x)
        return heads(k, self.n_head), heads(k, self.n_head)


class IdentityV(Projections):
    """Values are the input itself, cut into heads; only the lookup is learned."""

    def __init__(
        self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, bias: bool, give_to_mlp: bool = False
    ) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        _same_width("identity_v", d_model, n_kv_head * head_dim, "model.n_kv_head")
        self.qkv = FusedLinear(d_model, {"q": n_head * head_dim, "k": n_kv_head * head_dim}, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.qkv(x)
        return self.split(q, k, x)


class Raw(Projections):
    """No projection at all: Q = K = V = X, cut into heads."""

    late = True

    def __init__(self, d_model: int, n_head: int, n_kv_head: int, head_dim: int, give_to_mlp: bool = False) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        _same_heads("raw", n_head, n_kv_head)
        _same_width("raw", d_model, n_head * head_dim, "model.n_head")

    def write(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return heads(x, self.n_head), heads(x, self.n_head)


class LowRank(Projections):
    """Each of Q, K and V through a bottleneck of `rank` components, with no norm between. Raises UserError if rank <
    1.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        bias: bool,
        rank: int = 32,
        give_to_mlp: bool = False,
    ) -> None:
        super().__init__(n_head, n_kv_head, give_to_mlp)
        if rank < 1:
            raise UserError(f"projections.rank={rank} must be 1 or more")
        self.down = FusedLinear(d_model, {"q": rank, "k": rank, "v": rank}, bias=False)
        self.q = Linear(rank, n_head * head_dim, bias=bias)
        self.k = Linear(rank, n_kv_head * head_dim, bias=bias)
        self.v = Linear(rank, n_kv_head * head_dim, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.down(x)
        return self.split(self.q(q), self.k(k), self.v(v))
