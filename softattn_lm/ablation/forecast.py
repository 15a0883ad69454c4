"""How long an ablation still takes: the runs that are left, laid out on its slots in the order in which they start.

A run takes as long as the finished runs of its arm and size did, their median. Before the first of them has ended, as
long as the arm was measured to take alone, its start and its validations with it, times how much longer than that the
runs of other arms took.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import count
from statistics import median
from typing import Any

from softattn_lm.ablation.jobs import Job
from softattn_lm.ablation.lines import UNIFORM
from softattn_lm.ablation.matching import Costs
from softattn_lm.ablation.plan import Plan

START = 0.6  # seconds of a run for building, saving and ending; of tiny ones on two cores, half of it of a processor
FORWARDS = 3  # that take as long as one step on the same tokens, which passes back through them too
Seconds = dict[tuple[str | None, str], float]  # of a run, by size and arm


def measured_alone(plan: Plan, costs: Costs) -> Seconds:
    """The reference, which is not measured, is taken for as slow as the baseline. In `costs` from before they had them
    tokens that are only read are missing.
    """
    found: Seconds = {}
    for size, arms in costs.items():
        known = {arm: START + _trained(cost) + _read(cost) for arm, cost in arms.items()}
        if plan.baseline in known:
            known.setdefault(UNIFORM, known[plan.baseline])
        found |= {(size, arm): seconds for arm, seconds in known.items()}
    return found


def _trained(cost: Mapping[str, Any]) -> float:
    return float(cost["steps"] * cost["seconds_per_step"])


def _read(cost: Mapping[str, Any]) -> float:
    """Of validations and of scoring."""
    return float(cost["read_tokens"] / (FORWARDS * cost["tokens_per_second"])) if "read_tokens" in cost else 0.0


def expected(jobs: Sequence[Job], alone: Seconds, took: Mapping[str, float]) -> Seconds:
    """For every size and arm of `jobs`. took: path of a run -> what it took from its first step to its end."""
    own: dict[tuple[str | None, str], list[float]] = {}
    for job in jobs:
        if job.path in took:
            own.setdefault((job.size, job.arm), []).append(took[job.path])
    usual = median(alone.values()) if alone else 1.0
    slower = [median(of) / max(1e-3, alone.get(key, usual)) for key, of in own.items()]
    factor = median(slower) if slower else 1.0
    keys = {(job.size, job.arm) for job in jobs}
    return {key: median(own[key]) if key in own else factor * alone.get(key, usual) for key in keys}


def seconds_left(jobs: Sequence[Job], done: set[str], running: Mapping[str, float], each: Seconds, slots: int) -> float:
    """Until the last of `jobs` ends. done: paths; running: path -> seconds that it has run for; each: of a whole run.

    A free slot takes the first run that can start. Those that report wait for all that tune at their size.
    """
    tuning: dict[str | None, deque[Job]] = {job.size: deque() for job in jobs}
    reporting: dict[str | None, deque[Job]] = {job.size: deque() for job in jobs}
    untuned: Counter[str | None] = Counter()
    at_work: list[tuple[float, int, Job]] = []
    number = count()  # jobs themselves have no order
    for job in (job for job in jobs if job.path not in done):
        untuned[job.size] += job.stage == "tune"
        if job.path in running:
            rest = max(0.0, each[job.size, job.arm] - running[job.path])
            heapq.heappush(at_work, (rest, next(number), job))
        else:
            (tuning if job.stage == "tune" else reporting)[job.size].append(job)

    def next_job() -> Job | None:
        for size in tuning:
            if tuning[size]:
                return tuning[size].popleft()
            if reporting[size] and not untuned[size]:
                return reporting[size].popleft()
        return None

    now = 0.0
    while True:
        while len(at_work) < slots and (started := next_job()) is not None:
            heapq.heappush(at_work, (now + each[started.size, started.arm], next(number), started))
        if not at_work:
            return now
        now, _, ended = heapq.heappop(at_work)
        untuned[ended.size] -= ended.stage == "tune"
