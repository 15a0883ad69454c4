"""What the factor on q kᵀ does to a lookup: laws, and the same measured on drawn queries. float64 throughout.

    std of q·k             √D for components of unit variance
    at initialisation      √D · C · σ_q σ_k       rows of x of mean square 1 over C components, weights of std σ
    p of the best match    ≥ 1/(1 + (N−1) e^(−Δ/T))        Δ: its lead over the second, T the temperature
    value error            ≤ (N−1) e^(−Δ/T) · 2 max|v|     against the value of the best match
    with QK norm           |s| ≤ √D, so p ≤ 1/(1 + (N−1) e^(−2√D))

The soft dictionary has orthonormal keys and the query β k_i: Δ = β at T = 1, and it is one update of a modern Hopfield
network (Ramsauer et al. 2020, arXiv:2008.02217).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softattn_lm.evaluation.attention_rows import DEAD, entropy, jacobian_norm

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class RowFigures:
    """Of many rows: means of entropy (nats), of the largest weight and of the Jacobian norm, its QUANTILES, the
    fraction of rows where it is below 1e-3, and the standard deviation of scores.
    """

    logit_std: float
    entropy: float
    p_max: float
    jacobian: float
    quantiles: tuple[float, ...]
    dead: float


@dataclass(frozen=True)
class Gradients:
    """‖∂L/∂q‖ where ‖∂L/∂y‖ = 1 and values have unit variance: mean, median, fraction of rows below 1e-3."""

    mean: float
    median: float
    dead: float


@dataclass(frozen=True)
class Lookup:
    """One query of the soft dictionary: how far y is from the value sought, and the largest weight."""

    error: float
    error_bound: float
    p_max: float
    p_floor: float


def block_std(d_k: int, d_model: int, std_q: float, std_k: float, mean_square: float = 1.0) -> float:
    """Standard deviation of q·k, no scale, if W_q, W_k and the input are independent of each other."""
    return math.sqrt(d_k) * d_model * mean_square * std_q * std_k


def p_floor(lead: float, n_keys: int) -> float:
    """The least weight of the best match; lead: Δ/T."""
    return 1 / (1 + (n_keys - 1) * math.exp(-lead))


def p_ceiling(contrast: float, n_keys: int) -> float:
    """The largest weight there can be when no two scores differ by more than `contrast` (2√D with QK norm)."""
    return 1 / (1 + (n_keys - 1) * math.exp(-contrast))


def weighed_rows(scores: Tensor, weights: Tensor) -> RowFigures:
    """(R, N) scores (any constant per row may be added) and their weights, float64."""
    norms = jacobian_norm(weights)
    return RowFigures(
        logit_std=scores.var(-1).mean().sqrt().item(),
        entropy=entropy(weights).mean().item(),
        p_max=weights.amax(-1).mean().item(),
        jacobian=norms.mean().item(),
        quantiles=tuple(torch.quantile(norms[:100_000], torch.tensor(QUANTILES, dtype=norms.dtype)).tolist()),
        dead=(norms < DEAD).double().mean().item(),
    )


@dataclass(frozen=True)
class Draw:
    """Queries and keys of N(0, 1) components: q·k_j = along_j · ‖q‖, and per row what gradients need.

    The N keys of a row are seen along q (N numbers) and, for a gradient Σ_j w_j k_j, across it: a sum of independent
    normal vectors, √(Σ w²) times one of D − 1 components. So a row takes 2 N + 2 draws whatever D is, exactly in law.
    """

    d_k: int
    length: Tensor  # (R, 1) ‖q‖
    along: Tensor  # (R, N)
    across: Tensor  # (R,) length of a normal vector of D − 1 components
    gains: Tensor  # (R, N) v_j · ∂L/∂y

    def scores(self) -> Tensor:
        """(R, N) q·k_j without a scale."""
        return self.length * self.along

    def gradients(self, scale: float) -> Gradients:
        p = torch.softmax(scale * self.scores(), -1)
        through = p * (self.gains - (p * self.gains).sum(-1, keepdim=True))  # ∂L/∂s
        along = (through * self.along).sum(-1)
        norms = scale * (along.square() + through.square().sum(-1) * self.across.square()).sqrt()
        return Gradients(norms.mean().item(), norms.median().item(), (norms < DEAD).double().mean().item())


def draw(d_k: int, n_keys: int, rows: int, seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)

    def length(components: int) -> Tensor:
        if components == 0:
            return torch.zeros(rows, dtype=torch.float64)
        return torch.randn(rows, components, generator=generator, dtype=torch.float64).norm(dim=-1)

    def normal() -> Tensor:
        return torch.randn(rows, n_keys, generator=generator, dtype=torch.float64)

    return Draw(d_k, length(d_k)[:, None], normal(), length(d_k - 1), normal())


def soft_dictionary(beta: float, n: int = 64, d: int = 64, temperature: float = 1.0, seed: int = 0) -> Lookup:
    """The first of `n` orthonormal keys of `d` components is asked for with β times itself; the error is the norm of y
    − v_1, and so are the lengths of the N(0, 1) values in its bound.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, _ = torch.linalg.qr(torch.randn(d, n, generator=generator, dtype=torch.float64))
    values = torch.randn(n, d, generator=generator, dtype=torch.float64)
    p = torch.softmax(beta / temperature * (keys[:, 0] @ keys), -1)  # (N,)
    lead = beta / temperature
    bound = (n - 1) * math.exp(-lead) * 2 * values.norm(dim=-1).amax().item()
    # Without 1 − p, which is 0 in float64 long before the error is.
    error = (p[1:, None] * (values[1:] - values[0])).sum(0).norm().item()
    return Lookup(error, bound, p[0].item(), p_floor(lead, n))
