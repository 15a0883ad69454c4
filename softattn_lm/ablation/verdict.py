"""One arm against the baseline: better, worse, equivalent or undetermined, and what it would take to know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from softattn_lm.ablation.statistics import (
    Array,
    Interval,
    Part,
    bootstrap_interval,
    correlation,
    detectable,
    holm,
    level_of_look,
    paired_interval,
    pairs_needed,
    seed_part,
    sign_flip_p,
    sign_p,
    signs_needed,
    text_part,
)

ROUNDING = 1e-12  # of a loss: differences that differ by less do not differ
FLOAT32 = 2.0**-23  # of a loss: what another order of the same sums may change
Word = Literal["better", "worse", "equivalent", "identical", "undetermined"]


@dataclass(frozen=True)
class Comparison:
    """Differences arm − baseline over `seeds`, smaller losses being better. `interval` is None where a run diverged.

    alpha: the two-sided error that this comparison may make, after Bonferroni and the looks. p_holm: adjusted over the
    table. correlation: of the two arms over the seeds. more_seeds: for an undetermined verdict, how many seeds beyond
    these would find the smallest effect of interest with 80 % power at the next look; None: more seeds alone never do.
    text, rates: their share of the variance of the mean, beside the seeds.
    """

    arm: str
    verdict: Word
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    alpha: float
    interval: Interval | None
    p: float
    p_holm: float = 1.0
    p_sign_flip: float | None = None
    bootstrap: tuple[float, float] | None = None
    detectable: float | None = None
    correlation: float | None = None
    more_seeds: int | None = None
    diverged: int = 0
    baseline_diverged: int = 0
    text: float = 0.0
    rates: float = 0.0
    notes: tuple[str, ...] = field(default=())


def word(interval: Interval, smallest: float) -> Word:
    """The verdict of an interval of (arm − baseline): an effect smaller than `smallest` is none, whatever its sign."""
    if -smallest < interval.low and interval.high < smallest:
        return "equivalent"
    if interval.high < 0:
        return "better"
    if interval.low > 0:
        return "worse"
    return "undetermined"


def compare(
    losses: Mapping[str, Mapping[int, float]],
    baseline: str,
    smallest: float,
    *,
    windows: Mapping[str, Mapping[int, Array]] | None = None,
    rates: Mapping[str, Part] | None = None,
    look: int = 1,
    alpha: float = 0.05,
    tests: int | None = None,
) -> list[Comparison]:
    """Every arm against the baseline, at the level that all of them together need: α over `tests`, by default the arms
    that are here.

    losses[arm][seed]: nats on the test text, not finite for a run that diverged. windows[arm][seed]: the same per
    window, in reading order. rates[arm]: how far the choice of the learning rate may move the difference. Raises
    ValueError if an arm shares fewer than 2 seeds with the baseline.
    """
    arms = [arm for arm in losses if arm != baseline]
    now, later = (level_of_look(number, alpha) / max(1, tests or len(arms)) for number in (look, look + 1))
    made = [
        _compare(arm, losses, baseline, smallest, now, later, windows or {}, (rates or {}).get(arm)) for arm in arms
    ]
    return with_holm(made)


def with_holm(made: Sequence[Comparison]) -> list[Comparison]:
    """All that one table holds."""
    return [replace(each, p_holm=p) for each, p in zip(made, holm([each.p for each in made]), strict=True)]


def _compare(
    arm: str,
    losses: Mapping[str, Mapping[int, float]],
    baseline: str,
    smallest: float,
    alpha: float,
    later: float,
    windows: Mapping[str, Mapping[int, Array]],
    rates: Part | None,
) -> Comparison:
    seeds = tuple(sorted(losses[arm].keys() & losses[baseline].keys()))
    if len(seeds) < 2:
        raise ValueError(f"arm {arm} shares {len(seeds)} seeds with {baseline}; a paired interval needs 2 or more")
    mine = np.array([losses[arm][seed] for seed in seeds], dtype=float)
    theirs = np.array([losses[baseline][seed] for seed in seeds], dtype=float)
    bad, bad_baseline = ~np.isfinite(mine), ~np.isfinite(theirs)
    if bad.any() or bad_baseline.any():
        return _diverged(arm, seeds, mine, theirs, alpha, later)
    d = mine - theirs
    if np.all(d == 0):
        same = paired_interval(d, 1 - alpha)
        return Comparison(arm, "identical", seeds, tuple(d.tolist()), alpha, same, 1.0, detectable=0.0)
    if (rounding := FLOAT32 * float(np.abs(mine).max())) < smallest and np.abs(d).max() <= rounding:
        return _rounded(arm, seeds, d, rounding, alpha)
    if np.ptp(d) <= ROUNDING * np.abs(mine).max():
        note = f"every seed gives the same difference, {d[0]:+.4g}: the seeds changed nothing, and chance is unknown"
        return Comparison(arm, "undetermined", seeds, tuple(d.tolist()), alpha, None, 1.0, notes=(note,))
    text = _text(windows.get(arm), windows.get(baseline), seeds)
    others = [part for part in (text, rates) if part is not None]
    interval = paired_interval(d, 1 - alpha, others)
    verdict, sd = word(interval, smallest), float(d.std(ddof=1))
    fixed = sum(part.variance for part in others)
    needed = pairs_needed(sd, smallest, later, fixed=fixed) if verdict == "undetermined" else None
    more = None if needed is None else max(1, needed - len(seeds))
    total = seed_part(d).variance + fixed
    linked = correlation(theirs, mine)
    return Comparison(
        arm,
        verdict,
        seeds,
        tuple(d.tolist()),
        alpha,
        interval,
        interval.p,
        p_sign_flip=sign_flip_p(d),
        bootstrap=bootstrap_interval(d, 1 - alpha),
        detectable=detectable(sd, len(seeds), alpha, fixed=fixed),
        correlation=linked,
        more_seeds=more,
        text=text.variance / total if text is not None and total else 0.0,
        rates=rates.variance / total if rates is not None and total else 0.0,
        notes=_pairing(linked, sd, mine, theirs),
    )


def _rounded(arm: str, seeds: tuple[int, ...], d: Array, rounding: float, alpha: float) -> Comparison:
    """Arms that compute the same, but for the order of their sums: seeds and chance have nothing to say about it."""
    note = (
        f"no seed differs by more than {np.abs(d).max():.1e}, which float32 rounds away (up to {rounding:.1e}): to a "
        "reader the arms are the same"
    )
    interval = Interval(float(d.mean()), rounding, 1 - alpha, math.inf, 1.0)
    return Comparison(arm, "equivalent", seeds, tuple(d.tolist()), alpha, interval, 1.0, detectable=0.0, notes=(note,))


def _pairing(linked: float | None, sd: float, mine: Array, theirs: Array) -> tuple[str, ...]:
    unpaired = math.sqrt(float(mine.var(ddof=1) + theirs.var(ddof=1)))
    if linked is None or sd < unpaired:
        return ()
    return (f"pairing bought nothing: the differences spread {sd / unpaired:.2f} times as far as unpaired arms would",)


def _diverged(arm: str, seeds: tuple[int, ...], mine: Array, theirs: Array, alpha: float, later: float) -> Comparison:
    """A diverged run is worse than any other; two of them are equal. Only signs are left to count."""
    bad, bad_baseline = ~np.isfinite(mine), ~np.isfinite(theirs)
    ranks = [
        0.0 if a and b else math.inf if a else -math.inf if b else float(x - y)
        for a, b, x, y in zip(bad, bad_baseline, mine, theirs, strict=True)
    ]
    p = sign_p(ranks)
    median = float(np.median([np.clip(rank, -1e300, 1e300) for rank in ranks]))
    verdict: Word = "undetermined" if p >= alpha else "worse" if median > 0 else "better"
    more = max(1, signs_needed(later) - len(seeds)) if verdict == "undetermined" else None
    note = f"{int(bad.sum())} of {len(seeds)} runs diverged ({int(bad_baseline.sum())} of the baseline): signs only"
    return Comparison(
        arm,
        verdict,
        seeds,
        tuple(ranks),
        alpha,
        None,
        p,
        more_seeds=more,
        diverged=int(bad.sum()),
        baseline_diverged=int(bad_baseline.sum()),
        notes=(note,),
    )


def _text(mine: Mapping[int, Array] | None, theirs: Mapping[int, Array] | None, seeds: Sequence[int]) -> Part | None:
    if mine is None or theirs is None or not all(seed in mine and seed in theirs for seed in seeds):
        return None
    differences = np.mean([mine[seed] - theirs[seed] for seed in seeds], axis=0)
    return text_part(differences) if len(differences) > 1 else None
