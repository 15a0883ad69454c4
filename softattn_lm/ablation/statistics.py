"""What the paired differences between two arms say: one interval, its parts, and how sure one may be.

d_s = loss(arm, seed s) − loss(baseline, seed s): both arms of a pair share initial values, batches and windows.

    variance of mean(d) = Var_seeds/n + Var_text + Var_rates         each with its own degrees of freedom
    interval            = mean ± t(1 − α/2, ν) · √variance           ν by Satterthwaite
                          or ± t(1 − α/2, n − 1) · √(Var_seeds/n)    if that is wider

Satterthwaite 1946, Biometrics Bulletin 2(6). With a handful of seeds ν can grow faster than the variance when a well
known part is added, and an interval that became narrower by a doubt would miss up to four times as often as it says
(tests/null_sweeps.py); hence the second line. Tests and tables come from scipy and statsmodels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests

SIGN_FLIPS_FROM = 8  # pairs: with fewer the smallest p that exists is above 1/128
BOOTSTRAP_FROM = 20  # pairs: below, a bootstrap interval covers less than it says
MOST_PAIRS = 4096  # beyond, it is not a matter of seeds
# Of the error α that a table may make, what the seeds locked at the start may spend; each later look at the same arms
# with more seeds gets half of what was left, so that all looks together spend at most α.
FIRST_LOOK = 0.8

Array = NDArray[np.float64]
_NODES, _HALVES = np.polynomial.legendre.leggauss(200)
_PLACES, _WEIGHTS = (_NODES + 1) / 2, _HALVES / 2  # of an integral over 0..1


@dataclass(frozen=True)
class Part:
    """A variance of the mean difference and its degrees of freedom."""

    variance: float
    df: float


@dataclass(frozen=True)
class Interval:
    """mean ± half at confidence `level`; nats (or whatever the metric is)."""

    mean: float
    half: float
    level: float
    df: float
    p: float  # two-sided, against 0

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def seed_part(differences: Array) -> Part:
    """(n,) paired differences -> the variance of their mean. Raises ValueError for fewer than 2."""
    if len(differences) < 2:
        raise ValueError(f"an interval needs 2 paired seeds or more, and there are {len(differences)}")
    return Part(float(np.var(differences, ddof=1)) / len(differences), len(differences) - 1)


def text_part(windows: Array, block: int | None = None, resamples: int = 2000, seed: int = 0) -> Part:
    """(W,) differences per test window in reading order, averaged over seeds -> how far another text may move them.

    A moving-block bootstrap: neighbouring windows are alike, and taken as independent they would promise too much.
    block: windows, by default W^(1/2), of few windows half of them. Raises ValueError for less than two blocks. Künsch
    1989, Annals of Statistics 17(3).
    """
    count = len(windows)
    length = block or max(1, min(round(math.sqrt(count)), count // 2))
    if count < 2 * length:
        raise ValueError(f"{count} test windows are too few for blocks of {length}")
    generator = np.random.default_rng(seed)
    drawn = math.ceil(count / length)
    starts = generator.integers(0, count - length + 1, size=(resamples, drawn))
    sums = np.concatenate(([0.0], np.cumsum(windows)))
    means = (sums[starts + length] - sums[starts]).sum(axis=1) / (drawn * length)
    return Part(float(means.var(ddof=1)), count / length - 1)


def paired_interval(differences: Array, level: float, others: Sequence[Part] = ()) -> Interval:
    """The interval for the mean of paired differences; `others`: what else may move it, beside the seeds. It is never
    narrower than that of the seeds alone.
    """
    seeds, mean = seed_part(differences), float(differences.mean())
    made = [_around(mean, part, level) for part in (seeds, satterthwaite([seeds, *others])) if part.variance > 0]
    if not made:
        return Interval(mean, 0.0, level, math.inf, 1.0 if mean == 0 else 0.0)
    widest = max(made, key=lambda each: each.half)
    return replace(widest, p=max(each.p for each in made))


def _around(mean: float, part: Part, level: float) -> Interval:
    error = math.sqrt(part.variance)
    half, p = stats.t.ppf((1 + level) / 2, part.df) * error, 2 * stats.t.sf(abs(mean) / error, part.df)
    return Interval(mean, float(half), level, part.df, float(p))


def satterthwaite(parts: Sequence[Part]) -> Part:
    """The sum of independent variances, and the degrees of freedom of a chi-square that fits it best."""
    variance = sum(part.variance for part in parts)
    spread = sum(part.variance**2 / part.df for part in parts)
    return Part(variance, variance**2 / spread if spread else math.inf)


def unpaired_interval(first: Array, second: Array, level: float) -> Interval:
    """Of mean(second) − mean(first) for arms that share no seeds: Welch's t interval."""
    result = stats.ttest_ind(second, first, equal_var=False)
    interval = result.confidence_interval(level)
    mean = float(second.mean() - first.mean())
    return Interval(
        mean, (float(interval.high) - float(interval.low)) / 2, level, float(result.df), float(result.pvalue)
    )


def level_of_look(look: int, alpha: float = 0.05) -> float:
    """The error that look number `look` (1: the seeds locked at the start) may spend, so that all spend at most α."""
    if look < 1:
        raise ValueError(f"looks are counted from 1, and this one is {look}")
    return alpha * (FIRST_LOOK if look == 1 else (1 - FIRST_LOOK) / 2 ** (look - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values of the comparisons of one table. Holm 1979."""
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]] if p_values else []


def sign_flip_p(differences: Array, seed: int = 0) -> float | None:
    """Two-sided, by flipping the sign of each pair (all of the 2^n up to 13 pairs); None below 8 pairs."""
    if len(differences) < SIGN_FLIPS_FROM:
        return None
    exact = np.inf if len(differences) <= 13 else 9999
    result = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=exact,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def bootstrap_interval(differences: Array, level: float, seed: int = 0) -> tuple[float, float] | None:
    """BCa, for the reader who doubts the t interval; None below 20 pairs. Efron 1987, JASA 82(397)."""
    if len(differences) < BOOTSTRAP_FROM or np.ptp(differences) == 0:
        return None
    found = stats.bootstrap(
        (differences,), np.mean, confidence_level=level, method="BCa", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(found.low), float(found.high)


def detectable(sd: float, pairs: int, alpha: float, power: float = 0.8, fixed: float = 0.0) -> float:
    """The smallest true difference that a two-sided paired t test at `alpha` finds, with its sign, with this power.

    sd: of the paired differences; fixed: the part of the variance of their mean that no further pair reduces.
    """
    spread = math.sqrt(sd**2 + pairs * fixed)
    if spread == 0:
        return 0.0

    critical, root = float(stats.t.ppf(1 - alpha / 2, pairs - 1)), math.sqrt(pairs)

    def short(size: float) -> float:
        return float(_found(critical, pairs - 1, size * root)) - power

    most = 1.0
    while short(most) < 0:
        most *= 2
    return spread * float(optimize.brentq(short, 0.0, most, xtol=1e-10))


def _found(critical: float, df: int, away: float) -> float:
    """P(T > critical) of a non-central t: a normal over the square root of a chi-square, averaged over the latter.

    scipy's own, which statsmodels' power asks too, is NaN for some of what a few pairs need.
    """
    s = np.sqrt(stats.chi2.ppf(_PLACES, df) / df)
    return float(np.sum(_WEIGHTS * stats.norm.cdf(away - critical * s)))


def pairs_needed(sd: float, effect: float, alpha: float, power: float = 0.8, fixed: float = 0.0) -> int | None:
    """How many pairs find a true difference of `effect` with this power; None: not MOST_PAIRS either."""

    def enough(pairs: int) -> bool:
        return detectable(sd, pairs, alpha, power, fixed) <= effect

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST_PAIRS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def success_interval(successes: int, trials: int, level: float) -> tuple[float, float]:
    """Of a success rate. Clopper and Pearson 1934, Biometrika 26(4)."""
    found = stats.binomtest(successes, trials).proportion_ci(level, method="exact")
    return float(found.low), float(found.high)


def signs_needed(alpha: float) -> int:
    """Pairs that must all point one way before a sign test finds anything at `alpha`."""
    return 2 + math.floor(math.log2(1 / alpha))


def log_rank_p(first: Sequence[int | None], second: Sequence[int | None], steps: int) -> float:
    """Steps until a task was solved; None: not within `steps`. Two-sided. Mantel 1966."""

    def censored(times: Sequence[int | None]) -> stats.CensoredData:
        done = [time for time in times if time is not None]
        return stats.CensoredData(uncensored=done, right=[steps] * (len(times) - len(done)))

    if all(time is None for time in (*first, *second)):
        return 1.0
    with np.errstate(invalid="ignore"):
        p = float(stats.logrank(censored(first), censored(second)).pvalue)
    return 1.0 if math.isnan(p) else p  # all at the same step: nothing to tell apart


def sign_p(differences: Sequence[float]) -> float:
    """Two-sided sign test: what is left where a run diverged and a mean has no meaning (its difference is ±∞)."""
    ups, downs = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return float(stats.binomtest(ups, ups + downs).pvalue) if ups + downs else 1.0


def correlation(baseline: Array, arm: Array) -> float | None:
    """Of the two arms over shared seeds: near 0, pairing has bought nothing. None if one of them does not vary."""
    if len(baseline) < 3 or np.ptp(baseline) == 0 or np.ptp(arm) == 0:
        return None
    return float(np.corrcoef(baseline, arm)[0, 1])
