"""The figures of how arms were trained: their curves, and what they lose at other learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from softattn_lm.ablation.figures.drawn import SCALE, Drawn, colour_of, label, named
from softattn_lm.ablation.frame import Run
from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.lines import Line
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.sentences import at
from softattn_lm.runs.metrics import read_metrics


def curves(plan: Plan, judged: Judged, runs: Sequence[Run], lines: Sequence[Line]) -> Drawn | None:
    """Validation loss over steps: each seed thin, their mean thick."""
    own: dict[str, list[dict[int, float]]] = {}
    task = plan.metric.name == "accuracy"
    for run in runs:
        if run.stage == "report" and run.size == judged.size and run.arm in plan.arms:
            rows = [row for row in read_metrics(run.folder) if row["kind"] == "validation"]
            points = {row["step"]: row.get(plan.metric.name) for row in rows}
            known = {step: float(value) for step, value in points.items() if value is not None}
            if known:
                own.setdefault(run.arm, []).append(known)
    if not own:
        return None
    own = {arm: own[arm] for arm in (plan.baseline, *plan.arms) if arm in own}

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        for arm, curves in own.items():
            colour, factor = colour_of(plan, arm), 100.0 if task else 1.0
            for curve in curves:
                ax.plot([*curve], [factor * v for v in curve.values()], color=colour, lw=0.7, alpha=0.35)
            shared = sorted(set.intersection(*(set(curve) for curve in curves)))
            means = [factor * float(np.mean([curve[step] for curve in curves])) for step in shared]
            ax.plot(shared, means, color=colour, lw=1.9, marker="." if len(shared) < 20 else "", label=label(arm))
        ax.set_xlabel("optimizer steps")
        ax.set_ylabel("validation accuracy, %" if task else "validation loss, nats per token")
        values = [v for curves in own.values() for curve in curves for v in curve.values()]
        low, high = min(values), max(values)
        if not task and len(values) > 20:
            last = [curve[max(curve)] for curves in own.values() for curve in curves]
            high = max(float(np.quantile(values, 0.95)), *last)
            ax.set_ylim(low - 0.04 * (high - low), high + 0.02 * (high - low))
        for line, style in zip(lines, cycle(("--", ":", "-."))):
            said = f"{label(line.name)}, for scale: {line.validation:.3f}"
            look: Any = {"color": SCALE, "lw": 1.1, "ls": style}
            if low - (high - low) / 2 < line.validation < high + (high - low) / 2:
                bottom, top = ax.get_ylim()
                ax.axhline(line.validation, label=said, **look)
                ax.set_ylim(min(bottom, line.validation - 0.02), max(top, line.validation + 0.02))
            else:  # far away, where it would press the curves together
                ax.plot([], [], label=f"{said}, out of view", **look)
        ax.legend()

    what = "accuracy" if task else "loss"
    caption = f"Validation {what} while training{at(judged.size)}: thin lines are seeds, thick ones their mean."
    caption += f" Across, for scale: {', '.join(line.name for line in lines)}." if lines else ""
    return Drawn(named("curves", judged.size), caption, (7.6, 3.8), draw)


def rates(plan: Plan, judged: Judged) -> Drawn | None:
    """Loss over the tried learning rates, and the rate that was chosen."""
    tables = {arm: row["losses"] for arm, row in judged.choices.items() if row.get("losses")}
    if not tables:
        return None

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        lowest: list[float] = []
        for number, (arm, losses) in enumerate(tables.items()):
            colour = colour_of(plan, arm)
            rates = sorted(losses, key=float)
            seeds = [[losses[rate][s] for s in losses[rate] if losses[rate][s] is not None] for rate in rates]
            whole = [(float(r), of) for r, of in zip(rates, seeds, strict=True) if len(of) == len(losses[r]) and of]
            for rate, of in whole:
                ax.plot([rate] * len(of), of, ".", color=colour, ms=3.5, alpha=0.5)
            ax.plot([r for r, _ in whole], [float(np.mean(of)) for _, of in whole], color=colour, label=label(arm))
            lowest += [float(np.mean(of)) for _, of in whole]
            for lost in (float(r) for r, of in zip(rates, seeds, strict=True) if len(of) < len(losses[r])):
                ax.plot(lost, 0.97 - 0.04 * number, "x", color=colour, transform=ax.get_xaxis_transform(), ms=6)
            ax.axvline(judged.choices[arm]["lr"], color=colour, lw=1.1, ls=":")
        ax.set_xscale("log", base=2)
        ticks = sorted({float(rate) for losses in tables.values() for rate in losses})
        step = max(1, len(ticks) // 8)
        ax.set_xticks(ticks[::step], [f"{tick:.2g}" for tick in ticks[::step]])
        ax.set_xlabel("learning rate")
        ax.set_ylabel("validation loss, nats per token")
        if lowest and max(lowest) > min(lowest):
            top = min(max(lowest), min(lowest) + 4 * (float(np.median(lowest)) - min(lowest)) + 1e-9)
            ax.set_ylim(min(lowest) - 0.06 * (top - min(lowest)), top + 0.08 * (top - min(lowest)))
        ax.legend()

    caption = (
        f"Learning-rate sensitivity{at(judged.size)}: tuning seeds as points, their mean as a line; dotted: the "
        "chosen rate; crosses: rates at which a seed diverged."
    )
    return Drawn(named("learning_rates", judged.size), caption, (7.6, 3.8), draw)
