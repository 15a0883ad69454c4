"""Every arm gets the learning rate that suits it, and the choice is no better known than the runs it was read from.

Each arm tries the same log-spaced grid of the one `lr` on the same tuning seeds. Near its best, the loss is a parabola
of log lr whose height differs per seed:

    loss(x, s) = a_s + b·x + c·x²,  x = log2 lr          chosen: x̂ = −b / 2c, kept inside the grid
    what the choice costs: c·(x̂ − x*)², of which the fit knows the variance V of x̂

so the excess loss of an arm has the second moment 3(cV)², and both arms of a difference add theirs to its variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from softattn_lm.ablation.statistics import Part, satterthwaite

Edge = Literal["low", "high"]
_NORMAL = stats.norm.ppf((np.arange(400) + 0.5) / 400)
NEIGHBOURS = 2  # grid points on each side of the best that the parabola is laid through


@dataclass(frozen=True)
class Choice:
    """lr: chosen; excess: typical loss that the choice gives away, c·V; df: of the fit; edge: where the best rate lies
    on the end of the grid, so that the grid must grow; smooth: False if no parabola could be laid and the best point
    was taken.
    """

    lr: float
    excess: float
    df: float
    edge: Edge | None = None
    smooth: bool = True

    @property
    def part(self) -> Part:
        return Part(3 * self.excess**2, self.df)


def together(baseline: Choice, arm: Choice) -> Part:
    """What the two choices of a difference add to its variance."""
    return satterthwaite([baseline.part, arm.part])


def choose(losses: Mapping[float, Mapping[int, float]]) -> Choice:
    """losses[lr][tuning seed] -> the rate. A rate at which any seed diverged is no candidate.

    Raises ValueError if every rate diverged, or rates were tried on different seeds.
    """
    rates = sorted(losses)
    seeds = sorted({seed for row in losses.values() for seed in row})
    if any(sorted(row) != seeds for row in losses.values()):
        raise ValueError("every learning rate is tried on the same tuning seeds")
    table = np.array([[losses[rate][seed] for seed in seeds] for rate in rates], dtype=float)  # (rates, seeds)
    means = np.where(np.isfinite(table).all(axis=1), table.mean(axis=1), np.inf)
    if not np.isfinite(means).any():
        raise ValueError("every learning rate diverged")
    best = int(means.argmin())
    edge: Edge | None = "low" if best == 0 else "high" if best == len(rates) - 1 else None
    near = [
        i for i in range(max(0, best - NEIGHBOURS), min(len(rates), best + NEIGHBOURS + 1)) if np.isfinite(means[i])
    ]
    df = len(near) * len(seeds) - len(seeds) - 2
    if len(near) < 3 or df < 1:
        return Choice(rates[best], 0.0, math.inf, edge, smooth=False)
    return _parabola(rates, near, best, table, edge, df)


def _parabola(rates: list[float], near: list[int], best: int, table: np.ndarray, edge: Edge | None, df: int) -> Choice:
    x = np.log2([rates[i] / rates[best] for i in near])
    rows, seeds = len(near), table.shape[1]
    design = np.zeros((rows * seeds, seeds + 2))
    design[:, 0], design[:, 1] = np.repeat(x, seeds), np.repeat(x**2, seeds)
    design[np.arange(rows * seeds), 2 + np.tile(np.arange(seeds), rows)] = 1.0
    target = table[near].ravel()
    found, *_ = np.linalg.lstsq(design, target, rcond=None)
    b, c = float(found[0]), float(found[1])
    noise = float(((target - design @ found) ** 2).sum()) / df
    if c <= 0:
        # Chance alone has chosen among rates that look alike: it may have cost as much as their means spread by chance.
        return Choice(rates[best], math.sqrt(noise / seeds), df, edge, smooth=False)
    covariance = noise * np.linalg.inv(design.T @ design)[:2, :2]
    slope = np.array([-1 / (2 * c), b / (2 * c * c)])
    vertex, inside = -b / (2 * c), float(np.clip(-b / (2 * c), x[0], x[-1]))
    # Where else in the grid the vertex might have been found: beyond an edge there is nothing to choose.
    others = np.clip(vertex + math.sqrt(float(slope @ covariance @ slope)) * _NORMAL, x[0], x[-1])
    return Choice(rates[best] * 2**inside, c * float(((others - inside) ** 2).mean()), df, edge)
