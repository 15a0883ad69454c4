"""A question that was mended before any of its runs has finished is planned anew: nothing has been seen yet.

<folder>/aside/<n>/     plan, log and runs of the n-th plan that came to nothing; no report reads them
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softattn_lm.ablation import journal
from softattn_lm.ablation.executors.slots import FILE as SLOTS
from softattn_lm.ablation.jobs import outcome_in
from softattn_lm.ablation.plan import FILE as PLAN
from softattn_lm.runs.lock import is_in_hand
from softattn_lm.runs.status import read_status

ASIDE = "aside"
_STAGES = ("tune", "report", "reference")


def may_be_anew(folder: Path, events: Sequence[dict[str, Any]]) -> bool:
    """Whether the question asks something else than what was planned in `folder`, of which nothing came. A run that
    diverged is a result, and one that a process trains now may become one. `events`: see plan.agreed.
    """
    if not any(event["event"] == "edited" and event["changes"] for event in events):
        return False
    runs = [file.parent for stage in _STAGES for file in (folder / stage).rglob("config.yaml")]
    return not any(_came_to_something(run) for run in runs)


def _came_to_something(run: Path) -> bool:
    return read_status(run).get("state") == "finished" or outcome_in(run, "tune").end == "diverged" or is_in_hand(run)


def set_aside(folder: Path) -> Path:
    """Makes room for another plan, and says where the old one lies. What was measured is measured again if need be."""
    number = 1 + sum(1 for _ in (folder / ASIDE).glob("*"))
    place = folder / ASIDE / str(number)
    place.mkdir(parents=True)
    for name in (*_STAGES, SLOTS, journal.FILE, PLAN):
        if (folder / name).exists():
            (folder / name).rename(place / name)
    return place
