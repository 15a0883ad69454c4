"""ROOM 8: from a question to a table with intervals. A planner above executors, statistics, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

__all__ = ["runs"]


def runs(folder: str | Path) -> pandas.DataFrame:
    """One tidy row per run of an ablation: see frame.runs, whose packages come along only when it is called."""
    from softattn_lm.ablation import frame

    return frame.runs(folder)
