"""What all figures of a report have in common: what a figure is, and the colours and names in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from softattn_lm.ablation.plan import Plan

# Okabe and Ito 2008: told apart by those who see few colours, too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F", "#BCBD22")
SCALE = "#6a6f76"


@dataclass(frozen=True)
class Drawn:
    """What is drawn on one figure: its caption, its size in inches, and how."""

    name: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Any], None]


def label(name: str) -> str:
    """A $ would begin a formula."""
    return name.replace("$", r"\$")


def colour_of(plan: Plan, arm: str) -> str:
    """The baseline is black."""
    names = [plan.baseline, *(name for name in plan.arms if name != plan.baseline)]
    return COLOURS[names.index(arm) % len(COLOURS)]


def named(stem: str, size: str | None) -> str:
    """Of the files of a figure."""
    return stem if size is None else f"{stem}-{size}"
