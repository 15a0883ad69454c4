"""What the factor on q kᵀ does to a lookup: laws, and the same measured on drawn queries. float64 throughout.

    std of q·k             √D for components of unit variance
    at initialisation      √D · C · σ_q σ_k       rows of x of mean square 1 over C components, weights of std σ
    p of the best match    ≥ 1/(1 + (N−1) e^(−Δ/T))        Δ: its lead over the second, T the temperature
    value error            ≤ (N−1) e^(−Δ/T) · 2 max|v|     |y − v_best|, lengths of vectors

The soft dictionary has orthonormal keys and the query β k_i: Δ = β at T = 1, and it is one update of a modern Hopfield
network (Ramsauer et al. 2020, arXiv:2008.02217).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from softattn_lm.evaluation.attention_rows import DEAD, entropy, jacobian_norm, shares

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class RowFigures:
    """Of many rows: means of entropy (nats), of the largest weight and of the Jacobian norm, its QUANTILES, the
    fraction of rows where it is below 1e-3, and the standard deviation of scores, None of rows of one.
    """

    logit_std: float | None
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
    """One query of the soft dictionary: how far y is from the value sought, in lengths of a value, and its weight."""

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


def weighed_rows(scores: Tensor, weights: Tensor, rows_sum_to: str = "one") -> RowFigures:
    """(R, N) scores (any constant per row may be added) and their weights, float64.

    rows_sum_to: as a kernel says of its A. Entropy and the largest weight are those of p = |A| / Σ|A|, the Jacobian is
    that at A, or at p if rows may sum to anything.
    """
    p = shares(weights)
    norms = jacobian_norm(p if rows_sum_to == "anything" else weights)
    return RowFigures(
        logit_std=scores.var(-1).mean().sqrt().item() if scores.shape[-1] > 1 else None,
        entropy=entropy(p).mean().item(),
        p_max=p.amax(-1).mean().item(),
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

    length: Tensor  # (R, 1) ‖q‖
    along: Tensor  # (R, N)
    across: Tensor  # (R,) length of a normal vector of D − 1 components
    gains: Tensor  # (R, N) v_j · ∂L/∂y

    def scores(self) -> Tensor:
        """(R, N) q·k_j without a scale."""
        return self.length * self.along

    def gradients(self, scale: float, p: Tensor) -> Gradients:
        """p: (R, N), the softmax of scale · scores."""
        through = p * (self.gains - (p * self.gains).sum(-1, keepdim=True))  # ∂L/∂s
        along = (through * self.along).sum(-1)
        norms = scale * (along.square() + through.square().sum(-1) * self.across.square()).sqrt()
        return Gradients(norms.mean().item(), norms.median().item(), (norms < DEAD).double().mean().item())


def draw_rows(d_k: int, n_keys: int, rows: int, seed: int) -> Draw:
    generator = np.random.default_rng(seed)
    length = generator.chisquare(d_k, rows) ** 0.5
    across = generator.chisquare(d_k - 1, rows) ** 0.5 if d_k > 1 else np.zeros(rows)
    along, gains = generator.standard_normal((rows, n_keys)), generator.standard_normal((rows, n_keys))
    return Draw(
        torch.from_numpy(length)[:, None], torch.from_numpy(along), torch.from_numpy(across), torch.from_numpy(gains)
    )


def soft_dictionary(beta: float, n: int = 64, d: int = 64, temperature: float = 1.0, tied: bool = False) -> Lookup:
    """The first of `n` orthonormal keys of `d` >= n components is asked for with β times itself. Values have length 1.

    tied: the second key is the first once more, so that there are two best matches and no limit but their average.
    """
    generator = torch.Generator().manual_seed(0)
    keys, _ = torch.linalg.qr(torch.randn(d, n, generator=generator, dtype=torch.float64))
    if tied:
        keys[:, 1] = keys[:, 0]
    values = torch.nn.functional.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)
    p = torch.softmax(beta / temperature * (keys[:, 0] @ keys), -1)  # (N,)
    # Not y − v_1: in float64 that would be 0 long before the error is.
    error = (p[1:, None] * (values[1:] - values[0])).sum(0).norm().item()
    lead = 0.0 if tied else beta / temperature
    return Lookup(error, (n - 1) * math.exp(-lead) * 2, p[0].item(), p_floor(lead, n))
