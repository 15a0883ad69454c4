"""The figure of `softattn telemetry`: a column per run, a line per layer, over optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Figure of a layer -> title of its panels, whether it is drawn in powers of ten.
PANELS = {
    "entropy": ("entropy, nats", False),
    "logit_abs_max": ("largest |logit|", True),
    "logit_std": ("logit std", True),
    "dead": ("dead rows", False),
    "induction": ("induction", False),
}


def draw(
    names: list[str], histories: list[dict[int, dict[int, dict[str, float | None]]]], files: Iterable[Path]
) -> None:
    """histories: per run, step -> layer -> figure. Runs share the vertical axis of a panel, so that they compare."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.2 * len(names), 2.0 * len(PANELS)), layout="constrained")
    axes = figure.subplots(len(PANELS), len(names), sharey="row", sharex="col", squeeze=False)
    for row, (panel, (title, powers)) in enumerate(PANELS.items()):
        drawn = False
        for column, (name, history) in enumerate(zip(names, histories, strict=True)):
            ax = axes[row, column]
            for layer in next(iter(history.values())):
                known = [(step, layers[layer][panel]) for step, layers in history.items() if layer in layers]
                points = [(step, value) for step, value in known if value is not None]
                ax.plot([x for x, _ in points], [y for _, y in points], marker=".", label=f"layer {layer}")
                drawn |= any(y > 0 for _, y in points)
            ax.grid(alpha=0.3)
            if row == 0:
                ax.set_title(name.replace("$", r"\$"), fontsize=9)  # $ would begin a formula
            if row == len(PANELS) - 1:
                ax.set_xlabel("optimizer steps")
        axes[row, 0].set_ylabel(title)
        if powers and drawn:
            axes[row, 0].set_yscale("log")
    axes[0, 0].legend(fontsize=7)
    for file in files:
        figure.savefig(file, dpi=150)
