"""Linear attention: the exponential of a score becomes a product of features, and the sum over keys a state.

    A_ij = φ(s q_i)·φ(k_j) / Σ_{j' ≤ i} φ(s q_i)·φ(k_j'),   φ(x) = elu(x) + 1 > 0,   s = scale
    y_i  = φ(s q_i)ᵀ S_i / φ(s q_i)·z_i,   S_i = S_{i−1} + φ(k_i) v_iᵀ,   z_i = z_{i−1} + φ(k_i)

Katharopoulos et al. 2020, arXiv:2006.16236, equations 7, 9 to 12 and 16 to 20. A state of D × D numbers per head cannot
hold more than about D keys apart.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.chunked import as_given, at_the_end, checked, in_chunks, joined, precise
from softattn_lm.attention.kernel import AttentionKernel, State
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError


class Linear(AttentionKernel):
    """chunk: tokens that are looked at in pairs; it changes the time, not the result.

    Raises UserError for dropout and for a chunk below 1.
    """

    recurrent = True
    refuses: ClassVar[dict[str, str]] = {
        "window": "its state forgets no key; use mask=causal",
        "sinks": "its state holds every key, the first ones among them; use mask=causal",
        "documents": "its state is not emptied between texts; use mask=causal",
        "bias": "it has no scores to add to; use position=rotary, learned, sinusoidal or none",
        "dropout": "it forms no weights to drop; type model.dropout=0, or attention.dropout=0 "
        "(in a pattern +attention.options.linear.dropout=0)",
    }

    def __init__(self, chunk: int = 64, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        if dropout:
            raise UserError(f"attention=linear with dropout={dropout}: {self.refuses['dropout']}")
        self.chunk = checked(chunk)

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
        assert bias is None, "refused"
        with as_given(q):
            matches = _of_queries(q, scale) @ _of_keys(k).mT  # (B, H, T, S)
            matches = matches.masked_fill(~visible.dense(), 0.0)
            return (matches / _above_zero(matches.sum(-1, keepdim=True))).to(q.dtype)

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
        assert not visible.cuts and visible.documents is None and bias is None, "refused"
        with as_given(q):
            queries = at_the_end(_of_queries(q, scale), k.shape[-2])
            y, _ = _read(queries, _of_keys(k), precise(v), None, self.chunk)
        return y[:, :, visible.past :].to(q.dtype)

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
        with as_given(q):
            y, state = _read(_of_queries(q, scale), _of_keys(k), precise(v), state, self.chunk)
        # A view would keep the states before every chunk alive.
        return y.to(q.dtype), {name: held.clone() for name, held in state.items()}


def _of_keys(k: Tensor) -> Tensor:
    """φ(k) = elu(k) + 1, without the rounding of e^k − 1 + 1."""
    k = precise(k)
    return torch.exp(k.clamp(max=0)) + F.relu(k)


def _of_queries(q: Tensor, scale: float | Tensor) -> Tensor:
    """φ(s q), times e^m where all components are below −m < 0: a factor of a row cancels in A, and far below 0 it would
    be 0 / 0.
    """
    q = precise(q) * scale
    highest = q.detach().amax(-1, keepdim=True).clamp(max=0)
    return torch.exp(q.clamp(max=0) - highest) + F.relu(q)


def _read(q: Tensor, k: Tensor, v: Tensor, state: State | None, chunk: int) -> tuple[Tensor, State]:
    """Features (B, H, T, D) of queries and keys, values -> y and the state behind the last token."""
    b, h, length, d = k.shape
    if state is None:
        state = {"values": k.new_zeros(b, h, d, v.shape[-1]), "keys": k.new_zeros(b, h, d)}
    q, k, v = (in_chunks(x, chunk) for x in (q, k, v))  # (B, H, N, c, D)
    inside = (q @ k.mT).tril()  # (B, H, N, c, c)
    # S and z before each chunk, and behind the last one.
    values = torch.cat((state["values"][:, :, None], k.mT @ v), dim=2).cumsum(2)  # (B, H, N + 1, D, D)
    keys = torch.cat((state["keys"][:, :, None], k.sum(-2)), dim=2).cumsum(2)  # (B, H, N + 1, D)
    total = inside.sum(-1, keepdim=True) + q @ keys[:, :, :-1, :, None]
    y = (inside @ v + q @ values[:, :, :-1]) / _above_zero(total)
    return joined(y, length), {"values": values[:, :, -1], "keys": keys[:, :, -1]}


def _above_zero(total: Tensor) -> Tensor:
    return total.clamp_min(torch.finfo(total.dtype).tiny)
