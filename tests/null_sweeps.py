"""How often the statistics of an ablation are wrong, on simulated sweeps: python tests/null_sweeps.py  (a minute)

Each figure comes from the functions that a report uses, on arms that do not differ.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np
from scipy import stats

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from softattn_lm.ablation.rates import choose, together
from softattn_lm.ablation.statistics import (
    Part,
    level_of_look,
    paired_interval,
    satterthwaite,
    seed_part,
    unpaired_interval,
)

ARMS, SEEDS = 8, 5
GRID = [2.0**k for k in range(-3, 4)]


def family_wise(sweeps: int, seed: int = 0, seeds: int = SEEDS, shared: float = 1.0) -> float:
    """Share of sweeps in which any of 7 arms differs from the baseline. shared: sd of what paired arms have in common,
    against 0.7 of each run's own.
    """
    generator = np.random.default_rng(seed)
    alpha, wrong = level_of_look(1) / (ARMS - 1), 0
    for _ in range(sweeps):
        runs = shared * generator.normal(size=seeds) + 0.7 * generator.normal(size=(ARMS, seeds))
        d = runs[1:] - runs[0]
        # The arm with the largest |t| decides, so one interval per sweep says whether any of them excludes 0.
        most = int(np.abs(d.mean(1) / d.std(1)).argmax())
        interval = paired_interval(d[most], 1 - alpha)
        wrong += not interval.low <= 0 <= interval.high
    return wrong / sweeps


def with_text(sweeps: int, share: float, arms: int = ARMS, seeds: int = SEEDS, seed: int = 0) -> tuple[float, float]:
    """(as reported, by Satterthwaite's sum alone): the same where the test text moves all seeds of an arm alike. share:
    of the variance of a mean difference; the part is estimated with 15 degrees of freedom, as from 256 windows.
    """
    generator = np.random.default_rng(seed)
    alpha, text = level_of_look(1) / (arms - 1), share / (1 - share) / seeds
    wrong = np.zeros(2)
    for _ in range(sweeps):
        d = generator.normal(size=(arms - 1, seeds)) + math.sqrt(text) * generator.normal(size=(arms - 1, 1))
        found = [Part(text * each / 15, 15) for each in generator.chisquare(15, arms - 1)]
        wrong[0] += any(paired_interval(row, 1 - alpha, [part]).p < alpha for row, part in zip(d, found, strict=True))
        sums = [satterthwaite([seed_part(row), part]) for row, part in zip(d, found, strict=True)]
        t = np.abs(d.mean(1)) / np.sqrt([part.variance for part in sums])
        wrong[1] += bool((2 * stats.t.sf(t, [part.df for part in sums]) < alpha).any())
    return float(wrong[0] / sweeps), float(wrong[1] / sweeps)


def over_looks(sweeps: int, seed: int = 0, first: int = SEEDS, last: int = 12, corrected: bool = True) -> float:
    """Share of null arms that any look excludes when a seed is added after each look."""
    generator = np.random.default_rng(seed)
    wrong = 0
    for _ in range(sweeps):
        d = generator.normal(size=last)
        levels = [level_of_look(look) if corrected else 0.05 for look in range(1, last - first + 2)]
        wrong += any(paired_interval(d[: first + i], 1 - a).p < a for i, a in enumerate(levels))
    return wrong / sweeps


def tuned(
    sweeps: int, curvature: float = 0.01, sd: float = 0.01, seed: int = 0, tuning_seeds: int = 3
) -> tuple[float, float]:
    """(with, without the uncertainty of the chosen rates): share of sweeps with any difference between 8 identical
    arms, each at a rate of its own choice out of 7.
    """
    generator = np.random.default_rng(seed)
    alpha = level_of_look(1) / (ARMS - 1)
    wrong = np.zeros(2)
    for _ in range(sweeps):
        best = generator.uniform(-0.5, 0.5)
        choices = []
        for _ in range(ARMS):
            losses = curvature * (np.log2(GRID)[:, None] - best) ** 2 + sd * generator.normal(size=(7, tuning_seeds))
            choices.append(choose({g: dict(enumerate(row)) for g, row in zip(GRID, losses.tolist(), strict=True)}))
        base = 0.01 * generator.normal(size=SEEDS)
        away = np.log2([choice.lr for choice in choices]) - best
        runs = curvature * away[:, None] ** 2 + base + 0.007 * generator.normal(size=(ARMS, SEEDS))
        for place, use in enumerate((True, False)):
            wrong[place] += any(
                paired_interval(
                    runs[arm] - runs[0], 1 - alpha, [together(choices[0], choices[arm])] if use else []
                ).p < alpha
                for arm in range(1, ARMS)
            )  # fmt: skip
    return float(wrong[0] / sweeps), float(wrong[1] / sweeps)


def unpaired_splits(losses: np.ndarray, splits: int, alpha: float = 0.05, seed: int = 0) -> float:
    """losses (N,) of one arm on different seeds -> share of random 5-against-5 splits that Welch's interval tells
    apart.
    """
    generator = np.random.default_rng(seed)
    wrong = 0
    for _ in range(splits):
        drawn = generator.permutation(losses)[: 2 * SEEDS]
        interval = unpaired_interval(drawn[:SEEDS], drawn[SEEDS:], 1 - alpha)
        wrong += not interval.low <= 0 <= interval.high
    return wrong / splits


def main() -> None:
    def show(what: str, began: float, *shares: float) -> None:
        print(
            f"{what:<96}{'  '.join(f'{share:6.2%}' for share in shares)}   {time.monotonic() - began:5.1f} s",
            flush=True,
        )

    began = time.monotonic()
    show("20,000 null sweeps, 8 arms x 5 seeds: family-wise error", began, family_wise(20_000))
    for arms, seeds in ((8, 5), (8, 3), (2, 5), (2, 2)):
        for share in (0.1, 0.5):
            began = time.monotonic()
            what = (
                f"2,000 null sweeps, {arms} x {seeds}, {share:.0%} of the variance from the text: as reported, summed"
            )
            show(what, began, *with_text(2000, share, arms, seeds))
    began = time.monotonic()
    show("2,000 arms looked at with 5, 6, .. 12 seeds: any look, corrected and not", began,
         over_looks(2000), over_looks(2000, corrected=False))  # fmt: skip
    for curvature, sd in ((0.01, 0.01), (0.003, 0.01), (0.01, 0.03), (0.003, 0.02)):
        began = time.monotonic()
        what = f"2,000 sweeps of 8 identical arms, tuned (c {curvature}, sd {sd}): with and without its uncertainty"
        show(what, began, *tuned(2000, curvature, sd))
    began = time.monotonic()
    losses = 2 + 0.01 * np.random.default_rng(5).normal(size=40)
    show("2,000 splits of 40 baselines, 5 against 5, unpaired", began, unpaired_splits(losses, 2000))


if __name__ == "__main__":
    main()
