"""From the run folders of one size to comparisons: which values are compared, and with what beside the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from softattn_lm.ablation import journal
from softattn_lm.ablation.frame import Array, Run, Scores
from softattn_lm.ablation.jobs import scored_again
from softattn_lm.ablation.looks import Look, look_at
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.rates import Choice, together
from softattn_lm.ablation.statistics import Part, log_rank_p, paired_interval, success_interval
from softattn_lm.ablation.verdict import Comparison, compare, with_holm
from softattn_lm.errors import UserError
from softattn_lm.runs.metrics import read_metrics


@dataclass(frozen=True)
class Success:
    """Of a task: how many runs solved it, with a 95 % interval; p: log-rank against the baseline on steps to it."""

    solved: int
    runs: int
    low: float
    high: float
    steps: tuple[int | None, ...]
    p: float | None


@dataclass(frozen=True)
class Judged:
    """values[arm][seed]: the metric itself, infinite or NaN for a run that diverged; comparisons: in losses, so that
    less is better: of an accuracy, its negative. exploratory[name][arm]: (mean, difference to the baseline, half of its
    own 95 % interval), not corrected for how many there are. shares["pairs" or "gap"][arm][bin]: (mean accuracy, half
    of its 95 % interval over seeds, NaN with one seed).
    """

    size: str | None
    split: str
    look: Look
    values: dict[str, dict[int, float]]
    comparisons: list[Comparison]
    choices: dict[str, dict[str, Any]]
    successes: dict[str, Success] = field(default_factory=dict)
    exploratory: dict[str, dict[str, tuple[float, float, float]]] = field(default_factory=dict)
    shares: dict[str, dict[str, dict[str, tuple[float, float]]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of one run, by arm
    notes: tuple[str, ...] = ()


def judge(plan: Plan, folder: Path, runs: Sequence[Run]) -> list[Judged]:
    """One per size. All comparisons of all sizes are one table, which may be wrong once in twenty."""
    found = [_of_size(plan, folder, [run for run in runs if run.size == size], size) for size in plan.sizes]
    adjusted = iter(with_holm([each for judged in found for each in judged.comparisons]))
    return [replace(judged, comparisons=[next(adjusted) for _ in judged.comparisons]) for judged in found]


def _of_size(plan: Plan, folder: Path, runs: Sequence[Run], size: str | None) -> Judged:
    reported = [r for r in runs if r.stage == "report" and r.arm in plan.arms and r.seed in plan.seeds]
    look = look_at(plan, folder, reported, size)
    # Before all seeds that were locked have ended, nothing of the test part is shown.
    split = plan.metric.split if look.final else "validation"
    counted = [run for run in reported if run.seed in look.seeds and run.end in ("finished", "diverged")]
    scores = _scores(counted, split)
    values: dict[str, dict[int, float]] = {arm: {} for arm in plan.arms}
    for run in counted:
        found = scores.get(run.path)
        values[run.arm][run.seed] = math.inf if found is None else found.value(plan.metric.name)
    sign = 1.0 if plan.metric.better == "lower" else -1.0
    losses = {arm: {s: sign * v if math.isfinite(v) else math.inf for s, v in of.items()} for arm, of in values.items()}
    windows: dict[str, dict[int, Array]] = {arm: {} for arm in plan.arms}
    for run in counted:
        if run.path in scores:
            windows[run.arm][run.seed] = sign * scores[run.path].windows(plan.metric.name)
    paired = _paired(losses, plan.baseline)
    choices = {row["arm"]: row for row in journal.read(folder, "chosen_rate") if row["size"] == size}
    comparisons = compare(
        {arm: losses[arm] for arm in paired},
        plan.baseline,
        plan.smallest,
        windows=windows,
        rates=_rates(plan, choices),
        look=max(1, look.number),
        tests=(len(plan.arms) - 1) * len(plan.sizes),
    )
    return Judged(
        size,
        split,
        look,
        values,
        comparisons,
        choices,
        successes=_successes(plan, counted, values),
        exploratory=_exploratory(plan, counted, scores),
        shares=_shares(plan, counted, scores),
        seconds={arm: float(np.mean(own)) for arm in plan.arms if (own := _seconds(reported, arm))},
        notes=_notes(plan, choices),
    )


def _scores(runs: Sequence[Run], split: str) -> dict[str, Scores]:
    """By path of the run. Raises UserError for runs that were scored on other windows, or not at all."""
    found: dict[str, Scores] = {}
    for run in runs:
        if run.end != "finished":
            continue
        scores = run.scores(split)
        if scores is None:
            raise UserError(f"{run.path} has finished and has no scores/{split}.npz; {scored_again(run.folder)}")
        first = next(iter(found), None)
        if first is not None and not np.array_equal(found[first].tokens, scores.tokens):
            raise UserError(
                f"{run.path} and {first} were scored on different windows of the {split} part ({len(scores.tokens)} "
                f"against {len(found[first].tokens)}), and one table compares like with like; move one of them away"
            )
        found[run.path] = scores
    return found


def _paired(losses: Mapping[str, Mapping[int, float]], baseline: str) -> list[str]:
    """The baseline and the arms that share two seeds with it."""
    shared = [arm for arm in losses if len(losses[arm].keys() & losses[baseline].keys()) >= 2]
    return [baseline, *(arm for arm in shared if arm != baseline)]


def _rates(plan: Plan, choices: Mapping[str, Mapping[str, Any]]) -> dict[str, Part]:
    if plan.metric.name != "loss" or plan.baseline not in choices:
        return {}
    made = {
        arm: Choice(row["lr"], row["excess"] or 0.0, math.inf if row["df"] is None else row["df"], row["edge"])
        for arm, row in choices.items()
    }
    return {arm: together(made[plan.baseline], choice) for arm, choice in made.items() if arm != plan.baseline}


def _notes(plan: Plan, choices: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    notes = []
    if choices and plan.metric.name != "loss":
        notes.append("rates were chosen by loss; how uncertain that choice is, is in nats and not in these intervals")
    for arm, row in choices.items():
        if row["edge"] is not None:
            notes.append(f"the best rate of {arm} lies on the {row['edge']} edge of the grid: it may want another yet")
        if not row["smooth"]:
            notes.append(f"no parabola fits the losses of {arm} over its rates: its best grid point was taken")
    return tuple(notes)


def _seconds(runs: Sequence[Run], arm: str) -> list[float]:
    return [run.summary["seconds"] for run in runs if run.arm == arm and run.summary.get("seconds")]


def _successes(plan: Plan, runs: Sequence[Run], values: Mapping[str, Mapping[int, float]]) -> dict[str, Success]:
    solved = plan.metric.solved
    if solved is None or plan.metric.name != "accuracy":
        return {}
    times = {arm: [steps_to(run, solved) for run in runs if run.arm == arm] for arm in plan.arms}
    found = {}
    for arm, of in values.items():
        if not of:
            continue
        count = sum(value >= solved for value in of.values() if math.isfinite(value))
        low, high = success_interval(count, len(of), 0.95)
        last = max(run.steps for run in runs if run.arm in (arm, plan.baseline))
        p = (
            log_rank_p(times[plan.baseline], times[arm], last)
            if arm != plan.baseline and times[plan.baseline]
            else None
        )
        found[arm] = Success(count, len(of), low, high, tuple(times[arm]), p)
    return found


def steps_to(run: Run, solved: float) -> int | None:
    """The step of the first validation that was solved; None if none was."""
    rows = [row for row in read_metrics(run.folder) if row["kind"] == "validation" and "accuracy" in row]
    return next((row["step"] for row in rows if (row["accuracy"] or 0.0) >= solved), None)


def _exploratory(
    plan: Plan, runs: Sequence[Run], scores: Mapping[str, Scores]
) -> dict[str, dict[str, tuple[float, float, float]]]:
    names = {"early": "loss in the first quarter of a window", "late": "loss in its last quarter"}
    names |= {"gain": "in-context gain, early − late"}
    figures: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        if run.path in scores:
            found = {names[key]: value for key, value in scores[run.path].places().items()}
            if plan.metric.name != "loss":
                found = {"loss of an answer": scores[run.path].value("loss")}
            for name, value in found.items():
                figures.setdefault(name, {}).setdefault(run.arm, {})[run.seed] = value
    return {name: _beside(of, plan.baseline) for name, of in figures.items()}


def _beside(of: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, tuple[float, float, float]]:
    rows = {}
    for arm, values in of.items():
        shared = sorted(values.keys() & of.get(baseline, {}).keys())
        mean = float(np.mean([*values.values()]))
        d = np.array([values[seed] - of[baseline][seed] for seed in shared]) if shared else np.empty(0)
        if arm == baseline or len(d) < 2:
            rows[arm] = (mean, math.nan, math.nan)
        else:
            interval = paired_interval(d, 0.95)
            rows[arm] = (mean, interval.mean, interval.half)
    return rows


def _shares(
    plan: Plan, runs: Sequence[Run], scores: Mapping[str, Scores]
) -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """See Judged. What tells nothing apart, as there is one bin, is left out."""
    accuracies: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in sorted(runs, key=lambda run: list(plan.arms).index(run.arm)):
        if run.path in scores:
            for what, bins in scores[run.path].shares().items():
                for name, accuracy in bins.items():
                    accuracies.setdefault(what, {}).setdefault(run.arm, {}).setdefault(name, []).append(accuracy)
    return {
        what: {arm: {name: _around(values) for name, values in bins.items()} for arm, bins in arms.items()}
        for what, arms in accuracies.items()
        if len({name for bins in arms.values() for name in bins}) > 1
    }


def _around(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], math.nan
    interval = paired_interval(np.array(values), 0.95)
    return interval.mean, interval.half
