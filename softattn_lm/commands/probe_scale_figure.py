"""The figure of `softattn probe_scale`: laws as lines, measurements as points."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def draw(found: dict[str, Rows], n_keys: int, files: Iterable[Path]) -> None:
    """found: the rows of dictionary, drawn and blocks, as probe_scale.json holds them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots(2, 3)
    _dictionary(axes[0, 0], axes[1, 0], found["dictionary"], n_keys)
    _spread(axes[0, 1], found)
    by_scale: dict[str, Rows] = {}
    for row in found["drawn"]:
        by_scale.setdefault(row["scale"], []).append(row)
    for scale, rows in by_scale.items():
        widths = [row["d_k"] for row in rows]
        axes[1, 1].plot(widths, [row["entropy"] for row in rows], marker=".", label=scale)
        low, middle, high = ([max(row["quantiles"][i], 1e-8) for row in rows] for i in (0, 2, 4))
        line = axes[0, 2].plot(widths, middle, marker=".", label=scale)[0]
        axes[0, 2].fill_between(widths, low, high, alpha=0.15, color=line.get_color())
        axes[1, 2].plot(widths, [row["dead"] for row in rows], marker=".", color=line.get_color(), label=scale)
        gradients = [row["gradient_dead"] for row in rows]
        axes[1, 2].plot(widths, gradients, linestyle=":", color=line.get_color())
    axes[1, 1].set(title=f"entropy of {n_keys} weights, nats", xlabel="$d_k$", xscale="log")
    axes[0, 2].set(title="softmax Jacobian norm, median and 5-95 %", xscale="log", yscale="log", xlabel="$d_k$")
    axes[1, 2].set(title="rows below 1e-3; dotted: gradient of q", xlabel="$d_k$", xscale="log")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    for file in files:
        figure.savefig(file, dpi=130)


def _dictionary(error: Any, weight: Any, rows: Rows, n_keys: int) -> None:
    sharp = [row["beta"] for row in rows]
    error.plot(sharp, [row["error_bound"] for row in rows], label=r"bound $2(N-1)e^{-\beta/T}$")
    error.plot(sharp, [row["error"] for row in rows], "o", label="measured")
    error.set(title=f"soft dictionary of {n_keys} keys: value error", xlabel=r"$\beta/T$", yscale="log")
    weight.plot(sharp, [row["p_floor"] for row in rows], label=r"law $1/(1+(N-1)e^{-\beta/T})$")
    weight.plot(sharp, [row["p_max"] for row in rows], "o", label="measured")
    weight.plot(sharp, [row["tied_p_max"] for row in rows], "x", label="two equal best keys")
    weight.set(title="weight of the best match", xlabel=r"$\beta/T$")


def _spread(ax: Any, found: dict[str, Rows]) -> None:
    """Standard deviation of q·k itself, which every scale multiplies by its own factor."""
    arms = {"N(0, 1)": found["drawn"]}
    for row in found["blocks"]:
        arms.setdefault(row["init"], []).append(row)
    # Two of the arms lie on each other.
    for (name, rows), size in zip(arms.items(), (11, 6, 6), strict=True):
        raw = {row["d_k"]: (row["logit_std_law"] / row["factor"], row["logit_std"] / row["factor"]) for row in rows}
        line = ax.plot(list(raw), [law for law, _ in raw.values()], label=f"{name}: law")[0]
        ax.plot(
            list(raw), [std for _, std in raw.values()], "o", ms=size, color=line.get_color(), label=f"{name}: measured"
        )
    ax.set(title="standard deviation of q·k", xlabel="$d_k$", xscale="log", yscale="log")
