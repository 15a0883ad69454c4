"""The figures of what an ablation decides: the differences with their intervals, and the same against size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from softattn_lm.ablation.figures.drawn import SCALE, Drawn, colour_of, label
from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.lines import Line
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.sections import beside_baseline
from softattn_lm.ablation.sentences import at, unit_of

VERDICTS = {"better": "#126b3a", "worse": "#a5281b", "equivalent": "#2b5c9e", "identical": "#2b5c9e"}


def forest(plan: Plan, judged: Sequence[Judged], lines: Sequence[Line]) -> Drawn | None:
    """A row per arm and size: the seeds' differences as points, their mean with its interval. A line beyond the axis,
    which would press the arms together, is an arrow at its end.
    """
    rows = [(each.size, c) for each in judged for c in each.comparisons if c.interval is not None]
    if not rows:
        return None
    unit = unit_of(plan)
    scale = [(line.name, d) for line in lines if (d := beside_baseline(plan, judged[0], line)) is not None]

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        least = plan.smallest * unit.factor
        ax.axvspan(-least, least, color="#2b5c9e", alpha=0.09, lw=0, label=f"smaller than ±{least:g} {unit.name}")
        ax.axvline(0, color="black", lw=0.8)
        for place, (_, c) in enumerate(rows):
            assert c.interval is not None
            colour = VERDICTS.get(c.verdict, "#6a6f76")
            mean, half = unit.sign * unit.factor * c.interval.mean, unit.factor * c.interval.half
            points = unit.sign * unit.factor * np.array(c.differences)
            ax.plot(points, np.full(len(points), place + 0.2), "o", ms=3.5, color=colour, alpha=0.45, mew=0)
            ax.errorbar(mean, place, xerr=half, fmt="s", ms=5.5, color=colour, capsize=3, lw=1.6)
            ax.annotate(
                f" {c.verdict}",
                (1.0, place),
                xycoords=("axes fraction", "data"),
                va="center",
                color=colour,
                fontsize=8.5,
            )
        names = [label(c.arm + at(size)) for size, c in rows]
        ax.set_yticks(range(len(rows)), names)
        ax.set_ylim(len(rows) - 0.5, -0.6)
        ax.grid(axis="y", visible=False)
        low, high = ax.get_xlim()
        for number, (name, away) in enumerate(scale):
            inside, said = low < away < high, f"{label(name)} {away:+.4f}"
            if inside:
                ax.axvline(away, color=SCALE, lw=1.2, ls="--")
            end = (away - low) / (high - low) if inside else float(away > 0)
            ax.annotate(
                said if inside else f"{said} →" if away > 0 else f"← {said}",
                (end, 1.0),
                xytext=(0, 3 + 10 * number + (14 if end <= 0.5 else 0)),  # above the legend
                xycoords="axes fraction",
                textcoords="offset points",
                ha="right" if end > 0.5 else "left",
                color=SCALE,
                fontsize=8.0,
            )
        better = "worse →" if unit.sign > 0 else "better →"
        split = "test" if judged[0].split == "test" else f"{judged[0].split} part, provisional"
        ax.set_xlabel(f"difference to {label(plan.baseline)} in {plan.metric.name}, {unit.name} ({split})    {better}")
        side = 0.0 if scale else 1.0
        ax.legend(loc="lower left" if scale else "lower right", bbox_to_anchor=(side, 1.0), borderaxespad=0.2)

    caption = f"Difference of each arm to {plan.baseline}: mean with its interval, and each seed as a point."
    caption += " For scale, to its mean: " + ", ".join(f"{name} {d:+.4f}" for name, d in scale) + "." if scale else ""
    return Drawn("differences", caption, (7.6, 1.5 + 0.42 * len(rows) + 0.14 * len(scale)), draw)


def ladder(plan: Plan, judged: Sequence[Judged]) -> Drawn | None:
    """The differences against size."""
    if len(judged) < 2 or not any(each.comparisons for each in judged):
        return None
    unit = unit_of(plan)
    places = {each.size: place for place, each in enumerate(judged)}
    arms: Mapping[str, list[tuple[int, float, float]]] = {
        arm: [
            (places[each.size], unit.sign * unit.factor * c.interval.mean, unit.factor * c.interval.half)
            for each in judged
            for c in each.comparisons
            if c.arm == arm and c.interval is not None and math.isfinite(c.interval.half)
        ]
        for arm in plan.arms
        if arm != plan.baseline
    }

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        least = plan.smallest * unit.factor
        ax.axhspan(-least, least, color="#2b5c9e", alpha=0.09, lw=0, label=f"smaller than ±{least:g} {unit.name}")
        ax.axhline(0, color="black", lw=0.8)
        for number, (arm, points) in enumerate(arms.items()):
            if points:
                shift = 0.06 * (number - (len(arms) - 1) / 2)
                x, y, half = zip(*points, strict=True)
                ax.errorbar(
                    [each + shift for each in x], y, yerr=half, color=colour_of(plan, arm), marker="s", ms=5, capsize=3,
                    label=label(arm),
                )  # fmt: skip
        ax.set_xticks(range(len(judged)), [str(each.size) for each in judged])
        ax.set_xlim(-0.5, len(judged) - 0.5)
        ax.set_xlabel("size of the model")
        ax.set_ylabel(f"difference to {label(plan.baseline)}, {unit.name}")
        ax.legend()

    return Drawn("ladder", f"Differences to {plan.baseline} against size, with their intervals.", (7.6, 3.8), draw)
