"""The figures of a report, each as PNG and SVG: the same runs make the same files, to the last byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softattn_lm.ablation.figures.differences import forest, ladder
from softattn_lm.ablation.figures.explored import places, shares
from softattn_lm.ablation.figures.training import curves, rates
from softattn_lm.ablation.frame import Run
from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.lines import Line
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.tables import Picture

_STYLE: Any = {
    "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 8.0, "svg.hashsalt": "softattn", "svg.fonttype": "path",
    "axes.titlesize": 10.0, "axes.titlelocation": "left", "path.simplify": True,
}  # fmt: skip


def draw_all(
    plan: Plan, judged: Sequence[Judged], runs: Sequence[Run], folder: Path, lines: Sequence[Line] = ()
) -> list[Picture]:
    """Writes folder/<name>.png and .svg for all that there is to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    found = [forest(plan, judged, lines if len(judged) == 1 else ())]
    found += [curves(plan, each, runs, [line for line in lines if line.size == each.size]) for each in judged]
    found += [figure for each in judged for figure in (rates(plan, each), places(plan, each, runs))]
    found += [shares(plan, each) for each in judged]
    found.append(ladder(plan, judged))
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
