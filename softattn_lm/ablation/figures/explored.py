"""The exploratory figures, of parts of a score: loss by place in the window, accuracy by pairs and by gap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from softattn_lm.ablation.figures.drawn import Drawn, colour_of, label, named
from softattn_lm.ablation.frame import Run
from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.sentences import at

_SHARES = {"pairs": "number of pairs", "gap": "gap"}


def places(plan: Plan, judged: Judged, runs: Sequence[Run]) -> Drawn | None:
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
            ax.plot(np.arange(1, len(means) + 1), means, color=colour_of(plan, arm), lw=1.3, label=label(arm))
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_xlabel("place in the window, tokens")
        ax.set_ylabel(f"{judged.split} loss, nats per token")
        ax.legend()

    caption = f"Loss by place in the window{at(judged.size)}, mean over seeds (exploratory)."
    return Drawn(named("positions", judged.size), caption, (7.6, 3.5), draw)


def shares(plan: Plan, judged: Judged) -> Drawn | None:
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
                    x, y, yerr=half, color=colour_of(plan, arm), marker="o", ms=3.5, capsize=2.5, label=label(arm)
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
