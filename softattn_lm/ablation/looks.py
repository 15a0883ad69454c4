"""When the test part may be read, how often it was, and at which level.

Seeds are locked when the ablation is planned. Until all of them have ended, a report shows the validation part and
decides nothing. Seeds that were added later are a look of their own, once all of them have ended: see
statistics.level_of_look for what each may spend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from softattn_lm.ablation import journal
from softattn_lm.ablation.frame import Run
from softattn_lm.ablation.plan import Plan

_ENDED = ("finished", "diverged", "failed")


@dataclass(frozen=True)
class Look:
    """number: 0 while seeds that were locked at the start are still missing; seeds: those that count."""

    number: int
    seeds: tuple[int, ...]
    waiting: dict[str, list[int]]  # arm -> planned seeds that have not ended
    lost: dict[str, list[int]]  # arm -> seeds without a result that nobody is going to train

    @property
    def final(self) -> bool:
        return self.number > 0


def look_at(plan: Plan, folder: Path, runs: Sequence[Run], size: str | None = None) -> Look:
    """`runs`: those of the report stage at one size."""
    given_up, left_out = _given_up(folder)
    ends = {(run.arm, run.seed): run.end for run in runs}

    def has_ended(arm: str, seed: int) -> bool:
        path = "/".join(["report", *([size] if size else []), arm, f"seed-{seed}"])
        return arm in left_out or path in given_up or ends.get((arm, seed)) in _ENDED

    waiting = {arm: [s for s in plan.seeds if not has_ended(arm, s)] for arm in plan.arms}
    lost = {
        arm: [s for s in plan.seeds if has_ended(arm, s) and ends.get((arm, s)) not in ("finished", "diverged")]
        for arm in plan.arms
    }
    number, seeds = 0, list[int]()
    for batch in batches(plan, folder):
        if any(seed in missing for seed in batch for missing in waiting.values()):
            break
        number, seeds = number + 1, [*seeds, *batch]
    return Look(
        number,
        tuple(seeds if number else plan.seeds),
        {arm: missing for arm, missing in waiting.items() if missing},
        {arm: missing for arm, missing in lost.items() if missing},
    )


def batches(plan: Plan, folder: Path) -> list[list[int]]:
    """The seeds locked at the start, then those that each later call added."""
    first = [seed for seed in plan.seeds if seed in (plan.seeds_at_start or plan.seeds)]
    found, known = [first], {*first}
    for row in journal.read(folder, "added_seeds"):
        found.append([seed for seed in row["seeds"] if seed not in known])
        known |= {*row["seeds"]}
    unlogged = [seed for seed in plan.seeds if seed not in known]
    return [batch for batch in (*found, unlogged) if batch]


def _given_up(folder: Path) -> tuple[set[str], set[str]]:
    """(paths of runs, arms) that the planner has given up since it was last started."""
    rows = journal.read(folder, "started", "failed")
    last = max((index for index, row in enumerate(rows) if row["event"] == "started"), default=-1)
    failed = [row for row in rows[last + 1 :] if row["event"] == "failed"]
    arms = {row["arm"] for row in failed if row.get("run") is None or row["run"].startswith("tune/")}
    return {row["run"] for row in failed if row.get("run") is not None}, arms


def note_reading(folder: Path, size: str | None, look: Look, arms: Sequence[str]) -> None:
    """Logs that the test part has been read, unless it was for these seeds and arms before."""
    for row in journal.read(folder, "read_test"):
        if row.get("size") == size and {*look.seeds} <= {*row["seeds"]} and {*arms} <= {*row["arms"]}:
            return
    journal.append(folder, "read_test", size=size, look=look.number, seeds=list(look.seeds), arms=list(arms))


def readings(folder: Path) -> int:
    """How many different sets of seeds and arms a report has read; the sizes of a ladder count together."""
    return len({(*row["seeds"], *row["arms"]) for row in journal.read(folder, "read_test")})
