"""The delta rule: a write replaces what its key returned before, where linear attention adds to it.

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,   y_t = S_t (s q_t),   ‖k_t‖ = 1,   s = scale

β_t = σ(w_β·x_t) is how much of the old value is replaced: Schlag et al. 2021, arXiv:2102.11174, section 4.2. Without a
gate α_t = 1: DeltaNet, Yang et al. 2024, arXiv:2406.06484, whose section 3 computes a chunk at once. With one,
α_t = exp(−e^a · softplus(w_α·x_t + b)): Gated DeltaNet, Yang et al. 2024, arXiv:2412.06464, section 3.

What is written is u_t: S_t = α_t S_{t−1} + u_t k_tᵀ with u_t = β_t (v_t − α_t S_{t−1} k_t). Within one chunk that is a
triangular system, with Γ_ij = Π_{j<l≤i} α_l and γ_i = Π_{l≤i} α_l counted from the state S before the chunk:

    (I + W) U = diag(β) (V − diag(γ) K Sᵀ),   W = strictly lower part of diag(β) (Γ ⊙ K Kᵀ)
    Y = diag(γ) Q Sᵀ + (Γ ⊙ Q Kᵀ, lower part) U

Keys are divided by their length here, queries are not: a scale has to act on them, and the norm behind the kernel, as
in the two later papers, takes their length out.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.chunked import as_given, at_the_end, checked, in_chunks, joined, precise
from softattn_lm.attention.kernel import AttentionKernel, State
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError


class Delta(AttentionKernel):
    """gate: forget by α_t per head and token. chunk: tokens that are looked at in pairs; it changes the time only.

    Raises UserError for dropout and for a chunk below 1.
    """

    recurrent = True
    state_products = 3  # it also reads what it writes over
    normed = True
    rows_sum_to = "anything"
    refuses: ClassVar[dict[str, str]] = {
        "window": "its state forgets by rule and not by distance; use mask=causal",
        "sinks": "its state keeps no key apart; use mask=causal",
        "documents": "its state is not emptied between texts; use mask=causal",
        "bias": "it has no scores to add to; use position=rotary, learned, sinusoidal or none",
        "dropout": "it forms no weights to drop; type model.dropout=0, or attention.dropout=0 "
        "(in a pattern +attention.options.delta.dropout=0)",
    }

    def __init__(self, d_model: int, n_head: int, gate: bool = False, chunk: int = 32, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        if dropout:
            raise UserError(f"attention=delta with dropout={dropout}: {self.refuses['dropout']}")
        self.chunk = checked(chunk)
        self.beta = nn.Linear(d_model, n_head, bias=False)
        self.alpha = nn.Linear(d_model, n_head) if gate else None
        if self.alpha is not None:
            # The paper draws rates from [1, 16] and steps from [0.001, 0.1]; here they are spread over the heads.
            spread = torch.linspace(0, 1, n_head)
            self.log_rate = nn.Parameter(torch.log(1 + 15 * spread))
            step = torch.exp(math.log(1e-3) + math.log(100) * spread)
            with torch.no_grad():
                self.alpha.bias.copy_(torch.log(torch.expm1(step)))  # softplus of it is the step
        for matrix in (self.beta, self.alpha):
            if matrix is not None:
                nn.init.zeros_(matrix.weight)  # a model draws them; alone, a kernel needs no seed

    def features(self, x: Tensor) -> Tensor:
        """(B, T, C) -> β and, with a gate, log α: (B, H, T, 1 or 2), at least float32."""
        found = [torch.sigmoid(precise(self.beta(x)))]  # (B, T, H)
        if self.alpha is not None:
            found.append(-torch.exp(precise(self.log_rate)) * F.softplus(precise(self.alpha(x))))
        return torch.stack(found, dim=-1).transpose(1, 2)

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
        assert features is not None and not visible.cuts and visible.documents is None and bias is None, "refused"
        with as_given(q):
            keys, (beta, log_alpha) = F.normalize(precise(k), dim=-1), _gates(features, q)
            decay, _ = _decays(log_alpha)  # (B, H, S, S)
            overlaps = beta * (decay * (keys @ keys.mT)).tril(-1)
            matches = decay[:, :, visible.past :] * (precise(q) * scale @ keys.mT)
            matches = matches.masked_fill(~visible.dense(), 0.0)  # (B, H, T, S)
            a = torch.linalg.solve_triangular(overlaps, matches, upper=False, left=False, unitriangular=True)
            return (a * beta.mT).to(q.dtype)

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
        assert features is not None and not visible.cuts and visible.documents is None and bias is None, "refused"
        # A product with 0 does not hide what is not a number: such a key is taken out, and spoils what comes after it.
        spoiled = ~(k.isfinite().all(-1, keepdim=True) & features.isfinite().all(-1, keepdim=True))
        k, features = k.masked_fill(spoiled, 0.0), features.masked_fill(spoiled, 0.0)
        with as_given(q):
            queries = at_the_end(precise(q) * scale, k.shape[-2])
            y, _ = _read(queries, k, precise(v), features, None, self.chunk)
        return y.masked_fill(spoiled.cumsum(-2) > 0, torch.nan)[:, :, visible.past :].to(q.dtype)

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
        assert features is not None
        memory = None if state is None else state["memory"]
        with as_given(q):
            y, memory = _read(precise(q) * scale, k, precise(v), features, memory, self.chunk)
        return y.to(q.dtype), {"memory": memory}


def _gates(features: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """β and log α, both (B, H, S, 1); log α = 0 without a gate."""
    features = features.to(precise(like).dtype)
    beta, log_alpha = features[..., :1], features[..., 1:]
    return beta, log_alpha if log_alpha.shape[-1] else torch.zeros_like(beta)


def _decays(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """(..., c, 1) -> Γ (..., c, c), whose upper part says nothing, and γ (..., c, 1).

    Sums of their own and not differences of sums, which lose digits where much is forgotten; all are ≤ 0.
    """
    c = log_alpha.shape[-2]
    between = log_alpha.expand(*log_alpha.shape[:-1], c).tril(-1).cumsum(-2)
    return torch.exp(between), torch.exp(log_alpha.cumsum(-2))


def _read(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor, memory: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """(B, H, T, D), scaled queries -> y and the memory Sᵀ (B, H, D, D) behind the last token."""
    length = k.shape[-2]
    if memory is None:
        memory = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    k = F.normalize(precise(k), dim=-1)
    q, k, v, beta, log_alpha = (in_chunks(x, chunk) for x in (q, k, v, *_gates(features, v)))  # (B, H, N, c, ·)
    decay, since = _decays(log_alpha)
    overlaps = beta * (decay * (k @ k.mT)).tril(-1)  # W: (B, H, N, c, c)
    sides = torch.cat((beta * v, beta * since * k), dim=-1)
    solved = torch.linalg.solve_triangular(overlaps, sides, upper=False, unitriangular=True)
    written, reread = solved.split((v.shape[-1], k.shape[-1]), dim=-1)  # U = written − reread · Sᵀ
    matches = (decay * (q @ k.mT)).tril()
    from_start, to_end = since * q, decay[..., -1:, :].mT * k
    rows = []
    for n in range(k.shape[2]):
        u = written[:, :, n] - reread[:, :, n] @ memory  # (B, H, c, D)
        rows.append(from_start[:, :, n] @ memory + matches[:, :, n] @ u)
        memory = since[:, :, n, -1:] * memory + to_end[:, :, n].mT @ u
    return joined(torch.stack(rows, dim=2), length), memory
