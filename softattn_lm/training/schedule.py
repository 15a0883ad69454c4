"""Learning rate schedules: optimizer step -> multiple of each group's own rate, in fractions of the whole run.

Step numbers count optimizer steps from 0: the first update uses `multiplier(0, steps)`. `warmup` below 1 is a fraction
of the run, from 1 on a number of steps. Warming up over w steps, update i uses (i + 1) / (w + 1) of the full rate, as
nanoGPT (`train.py`, `get_lr`) does; update w is the first at the full rate.

      constant          cosine            warmup-stable-decay    linear to zero
     /--------         /--\\             /---------\\            /\\
    /                 /     `--.        /            \\          /    `-._
"""

from __future__ import annotations

import math
from typing import Protocol

from softattn_lm.errors import UserError


class Schedule(Protocol):
    """A pure function of the step: nothing to save, and resuming with another budget simply reads another curve."""

    def multiplier(self, step: int, steps: int) -> float:
        """`step` in [0, steps) -> multiple in [0, 1]."""
        ...


def _fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"schedule.{name}={value} must lie between 0 and 1")
    return value


def _warmup(value: float) -> float:
    if not 0 <= value < math.inf:
        raise UserError(
            f"schedule.warmup={value} must be a fraction of the run below 1, or a number of steps from 1 on"
        )
    return value


def warmup_steps(warmup: float, steps: int) -> int:
    """Updates below the full rate: warmup=0.05 of 2000 steps and warmup=100 are the same 100."""
    return round(warmup * steps) if warmup < 1 else round(warmup)


def unfinished_warmup(schedule: Schedule, steps: int) -> str | None:
    """A line for a run that ends before its warm-up does, and so never trains at the full rate."""
    if not isinstance(schedule, Constant | Cosine | WarmupStableDecay | LinearToZero):
        return None
    warmup = warmup_steps(schedule.warmup, steps)
    if warmup < steps:
        return None
    return (
        f"warning: schedule.warmup={schedule.warmup:g} is {warmup} steps and the run has {steps}, so it never reaches "
        "the full learning rate; schedule.warmup=0.05 would be a twentieth of the run"
    )


def _rising(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


class Constant:
    """The full rate throughout, after an optional warm-up."""

    def __init__(self, warmup: float = 0.0) -> None:
        self.warmup = _warmup(warmup)

    def multiplier(self, step: int, steps: int) -> float:
        return _rising(step, warmup_steps(self.warmup, steps))


class Cosine:
    """Half a cosine from the full rate to `final_fraction` of it: final + (1 - final) (1 + cos(π t)) / 2.

    t = (step - warmup) / (steps - warmup), so the last update (step = steps - 1) stops one step short of the floor.
    """

    def __init__(self, warmup: float = 0.05, final_fraction: float = 0.1) -> None:
        self.warmup = _warmup(warmup)
        self.final_fraction = _fraction("final_fraction", final_fraction)

    def multiplier(self, step: int, steps: int) -> float:
        warmup = warmup_steps(self.warmup, steps)
        if step < warmup:
            return _rising(step, warmup)
        t = min(1.0, (step - warmup) / max(1, steps - warmup))
        return self.final_fraction + (1.0 - self.final_fraction) * 0.5 * (1.0 + math.cos(math.pi * t))


class WarmupStableDecay:
    """Warm-up, the full rate, then linearly down over the last `decay` of the run, to `final_fraction` of the rate.

    With d decay steps the last update uses 1/d of the way above the floor: none is wasted at a rate of zero.
    """

    def __init__(self, warmup: float = 20.0, decay: float = 0.6, final_fraction: float = 0.0) -> None:
        self.warmup = _warmup(warmup)
        self.decay = _fraction("decay", decay)
        self.final_fraction = _fraction("final_fraction", final_fraction)

    def multiplier(self, step: int, steps: int) -> float:
        decay = max(1, round(self.decay * steps))
        falling = min(1.0, (steps - step) / decay) if self.decay > 0 else 1.0
        falling = self.final_fraction + (1.0 - self.final_fraction) * max(0.0, falling)
        return min(_rising(step, warmup_steps(self.warmup, steps)), falling)


class LinearToZero:
    """A straight line from the end of the warm-up down to zero, which only the step after the last would reach."""

    def __init__(self, warmup: float = 0.05) -> None:
        self.warmup = _warmup(warmup)

    def multiplier(self, step: int, steps: int) -> float:
        warmup = warmup_steps(self.warmup, steps)
        if step < warmup:
            return _rising(step, warmup)
        return max(0.0, (steps - step) / max(1, steps - warmup))
