"""The figures of a report, each as PNG and SVG: the same runs make the same files, to the last byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from softattn_lm.ablation.frame import Run
from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.lines import Line
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.sections import beside_baseline
from softattn_lm.ablation.sentences import at, unit_of
from softattn_lm.ablation.tables import Picture
from softattn_lm.runs import read_metrics

# Okabe and Ito 2008: told apart by those who see few colours, too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F", "#BCBD22")
SCALE = "#6a6f76"
VERDICTS = {"better": "#126b3a", "worse": "#a5281b", "equivalent": "#2b5c9e", "identical": "#2b5c9e"}
_STYLE: Any = {
    "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 8.0, "svg.hashsalt": "softattn", "svg.fonttype": "path",
    "axes.titlesize": 10.0, "axes.titlelocation": "left", "path.simplify": True,
}  # fmt: skip

_SHARES = {"pairs": "number of pairs", "gap": "gap"}


@dataclass(frozen=True)
class Drawn:
    """What is drawn on one figure: its caption, its size in inches, and how."""

    name: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Any], None]


def draw_all(
    plan: Plan, judged: Sequence[Judged], runs: Sequence[Run], folder: Path, lines: Sequence[Line] = ()
) -> list[Picture]:
    """Writes folder/<name>.png and .svg for all that there is to draw. lines: at the first size of a ladder."""
    import matplotlib
    from matplotlib.figure import Figure

    found = [_forest(plan, judged, lines if len(judged) == 1 else ())]
    found += [_curves(plan, each, runs, lines if each.size == plan.sizes[0] else ()) for each in judged]
    found += [figure for each in judged for figure in (_rates(plan, each), _places(plan, each, runs))]
    found += [_shares(plan, each) for each in judged]
    found.append(_ladder(plan, judged))
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    with matplotlib.rc_context(_STYLE):
        for drawn in found:
            if drawn is None:
                continue
            figure = Figure(figsize=drawn.size, layout="constrained")
            drawn.draw(figure)
            figure.savefig(folder / f"{drawn.name}.svg", metadata={"Date": None, "Creator": None})
            figure.savefig(folder / f"{drawn.name}.png", dpi=150, metadata={"Software": None})
            pictures.append(Picture(drawn.name, drawn.caption))
    return pictures


def label(name: str) -> str:
    """A $ would begin a formula."""
    return name.replace("$", r"\$")


def _colour(plan: Plan, arm: str) -> str:
    """The baseline is black."""
    names = [plan.baseline, *(name for name in plan.arms if name != plan.baseline)]
    return COLOURS[names.index(arm) % len(COLOURS)]


def named(stem: str, size: str | None) -> str:
    """Of the files of a figure."""
    return stem if size is None else f"{stem}-{size}"


def _forest(plan: Plan, judged: Sequence[Judged], lines: Sequence[Line]) -> Drawn | None:
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


def _curves(plan: Plan, judged: Judged, runs: Sequence[Run], lines: Sequence[Line]) -> Drawn | None:
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
            colour, factor = _colour(plan, arm), 100.0 if task else 1.0
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


def _rates(plan: Plan, judged: Judged) -> Drawn | None:
    """Loss over the tried learning rates, and the rate that was chosen."""
    tables = {arm: row["losses"] for arm, row in judged.choices.items() if row.get("losses")}
    if not tables:
        return None

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        lowest: list[float] = []
        for number, (arm, losses) in enumerate(tables.items()):
            colour = _colour(plan, arm)
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


def _places(plan: Plan, judged: Judged, runs: Sequence[Run]) -> Drawn | None:
    """Loss by place in the window, on the part that is judged."""
    own: dict[str, list[np.ndarray]] = {}
    for run in runs:
        if run.stage == "report" and run.size == judged.size and run.seed in judged.values.get(run.arm, {}):
            scores = run.scores(judged.split) if run.end == "finished" else None
            if scores is not None and scores.position_nats is not None and scores.position_tokens is not None:
                counts = scores.position_tokens
                known = np.divide(scores.position_nats, counts, out=np.full(len(counts), np.nan), where=counts > 0)
                own.setdefault(run.arm, []).append(known)
    if not own or plan.metric.name == "accuracy":
        return None

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        for arm, curves in own.items():
            means = np.mean(curves, axis=0)
            ax.plot(np.arange(1, len(means) + 1), means, color=_colour(plan, arm), lw=1.3, label=label(arm))
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_xlabel("place in the window, tokens")
        ax.set_ylabel(f"{judged.split} loss, nats per token")
        ax.legend()

    caption = f"Loss by place in the window{at(judged.size)}, mean over seeds (exploratory)."
    return Drawn(named("positions", judged.size), caption, (7.6, 3.5), draw)


def _shares(plan: Plan, judged: Judged) -> Drawn | None:
    """Accuracy by number of pairs and by gap, side by side."""
    if not judged.shares:
        return None
    titles = {"pairs": "pairs in a sequence", "gap": "gap between answer and question, tokens"}

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(judged.shares), sharey=True, squeeze=False)[0]
        for ax, (what, arms) in zip(axes, judged.shares.items(), strict=True):
            bins = list(dict.fromkeys(name for of in arms.values() for name in of))
            for number, (arm, of) in enumerate(arms.items()):
                shift = 0.08 * (number - (len(arms) - 1) / 2)  # or intervals would hide one another
                x = [bins.index(name) + shift for name in of]
                y = [100 * mean for mean, _ in of.values()]
                half = [0.0 if math.isnan(each) else 100 * each for _, each in of.values()]
                ax.errorbar(
                    x, y, yerr=half, color=_colour(plan, arm), marker="o", ms=3.5, capsize=2.5, label=label(arm)
                )
            ax.set_xticks(range(len(bins)), bins)
            ax.set_xlabel(titles[what])
        bottom, top = axes[0].get_ylim()
        axes[0].set_ylim(max(bottom, -3), min(top, 103))
        axes[0].set_ylabel(f"{judged.split} accuracy, %")
        axes[-1].legend()

    caption = (
        f"Accuracy by {' and by '.join(_SHARES[what] for what in judged.shares)}{at(judged.size)}: mean over seeds "
        "with its 95 % interval (exploratory)."
    )
    return Drawn(named("shares", judged.size), caption, (7.6, 3.5), draw)


def _ladder(plan: Plan, judged: Sequence[Judged]) -> Drawn | None:
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
                    [each + shift for each in x], y, yerr=half, color=_colour(plan, arm), marker="s", ms=5, capsize=3,
                    label=label(arm),
                )  # fmt: skip
        ax.set_xticks(range(len(judged)), [str(each.size) for each in judged])
        ax.set_xlim(-0.5, len(judged) - 0.5)
        ax.set_xlabel("size of the model")
        ax.set_ylabel(f"difference to {label(plan.baseline)}, {unit.name}")
        ax.legend()

    return Drawn("ladder", f"Differences to {plan.baseline} against size, with their intervals.", (7.6, 3.8), draw)
