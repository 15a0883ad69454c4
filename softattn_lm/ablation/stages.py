"""Which runs an ablation still needs, asked anew after each of them: everything is read from disk.

tune      every arm × every rate of the grid × every tuning seed; a best rate on the edge extends the grid for all
choose    one rate per arm, once: what is in the log stays
report    every arm at its rate on the reported seeds, seed by seed, so that pairs complete early
reference  one run of the uniform kernel at the baseline's rate, last of its size: see lines.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softattn_lm.ablation import journal
from softattn_lm.ablation.jobs import Configs, Job, Outcome, outcome
from softattn_lm.ablation.lines import UNIFORM, no_reference
from softattn_lm.ablation.plan import Plan, Tune

if TYPE_CHECKING:
    from softattn_lm.ablation.rates import Choice

EXTENSIONS = 3  # of the grid on one side; what still improves then is chosen from the edge, and the report says so


class Stages:
    """given_up: path of a run folder -> why it is not tried again in this process. measured: the folder in which the
    arms were measured, if it is another.
    """

    def __init__(self, plan: Plan, folder: Path, configs: Configs, measured: Path | None = None) -> None:
        self.plan, self.folder, self.configs = plan, folder, configs
        self.given_up: dict[str, str] = {}
        self.refers = {size for size in plan.sizes if no_reference(plan, measured or folder, size) is None}
        self._done: dict[Job, Outcome] = {}
        self._chosen = {(row["size"], row["arm"]): float(row["lr"]) for row in journal.read(folder, "chosen_rate")}
        self._grids = {row["size"]: tuple(row["grid"]) for row in journal.read(folder, "grid_extended")}

    def needed(self) -> list[Job]:
        """Runs that can start now and have not ended, in the order to run them in."""
        jobs = [job for size in self.plan.sizes for job in self._needed(size)]
        return [job for job in jobs if job.path not in self.given_up and not self._ended(job)]

    def known(self) -> list[Job]:
        """All runs as far as they are known yet; those that report wait at the rate of the grid's middle. An arm one of
        whose tuning runs has been given up reports nothing.
        """
        jobs: list[Job] = []
        for size in self.plan.sizes:
            tuning = self.tuning(size) if self.plan.tune is not None else []
            lost = {job.arm for job in tuning if job.path in self.given_up}
            jobs += tuning
            jobs += self._reporting(size, [arm for arm in self.plan.arms if arm not in lost], provisional=True)
            jobs += [] if self.plan.baseline in lost else self._reference(size, provisional=True)
        return jobs

    def outcome(self, job: Job) -> Outcome:
        found = self._done.get(job)
        if found is None:
            found = outcome(self.folder, job)
            if found.end in ("finished", "diverged"):
                self._done[job] = found
        return found

    def _ended(self, job: Job) -> bool:
        return self.outcome(job).end in ("finished", "diverged")

    def _needed(self, size: str | None) -> Iterable[Job]:
        if self.plan.tune is None:
            return [*self._reporting(size, self.plan.arms), *self._reference(size)]
        waiting = [job for job in self.tuning(size) if not self._ended(job) and job.path not in self.given_up]
        if waiting:
            return waiting
        choices = {arm: self._choice(arm, size) for arm in self.plan.arms}
        if self._extended(size, choices):
            return self._needed(size)
        for arm, choice in choices.items():
            if choice is not None and (size, arm) not in self._chosen:
                self._log_choice(arm, size, choice)
        reported = self._reporting(size, [arm for arm, choice in choices.items() if choice is not None])
        return [*reported, *self._reference(size)]

    # -- tuning -------------------------------------------------------------------------------------------------------

    def grid(self, size: str | None) -> tuple[float, ...]:
        assert self.plan.tune is not None
        return self._grids.get(size, self.plan.tune.grid)

    def tuning(self, size: str | None) -> list[Job]:
        assert self.plan.tune is not None
        return [
            Job("tune", arm, seed, _rounded(self.configs.lr(arm, size) * rate), size, rate)
            for seed in self.plan.tune.seeds
            for rate in self.grid(size)
            for arm in self.plan.arms
        ]

    def losses(self, arm: str, size: str | None) -> dict[float, dict[int, float]]:
        """lr -> tuning seed -> validation loss, infinite where the run diverged; without runs that failed."""
        found: dict[float, dict[int, float]] = {}
        for job in self.tuning(size):
            if job.arm == arm and self._ended(job):
                found.setdefault(job.lr, {})[job.seed] = self.outcome(job).loss
        return found

    def _choice(self, arm: str, size: str | None) -> Choice | None:
        """None for an arm one of whose tuning runs failed: it would have had fewer trials than the others."""
        from softattn_lm.ablation.rates import Choice, choose  # scipy and statsmodels come along

        losses = self.losses(arm, size)
        assert self.plan.tune is not None
        tried = len(self.grid(size)) * len(self.plan.tune.seeds)
        if sum(map(len, losses.values())) < tried:
            return None
        if all(math.isinf(max(row.values())) for row in losses.values()):
            return Choice(min(losses), 0.0, math.inf, "low", smooth=False)
        return choose(losses)

    def _extended(self, size: str | None, choices: dict[str, Choice | None]) -> bool:
        """One more rate beyond each edge on which the best of an arm lies that has none chosen yet."""
        assert self.plan.tune is not None
        before = self.grid(size)
        for side in ("low", "high"):
            arms = [a for a, c in choices.items() if c is not None and c.edge == side and (size, a) not in self._chosen]
            wider = _wider(self.grid(size), side, self.plan.tune) if arms else self.grid(size)
            if wider != self.grid(size):
                self._grids[size] = wider
                journal.append(self.folder, "grid_extended", size=size, side=side, because=arms, grid=list(wider))
        return self.grid(size) != before

    def _log_choice(self, arm: str, size: str | None, choice: Choice) -> None:
        lr = _rounded(choice.lr)
        self._chosen[(size, arm)] = lr
        row: dict[str, Any] = {"arm": arm, "size": size, "lr": lr, "excess": choice.excess, "df": choice.df}
        row |= {"edge": choice.edge, "smooth": choice.smooth, "losses": self.losses(arm, size)}
        journal.append(self.folder, "chosen_rate", **row)

    # -- reporting ----------------------------------------------------------------------------------------------------

    def _reporting(self, size: str | None, arms: Iterable[str], provisional: bool = False) -> list[Job]:
        rates = self._rates(size, arms, provisional)
        return [Job("report", arm, seed, lr, size) for seed in self.plan.seeds for arm, lr in rates.items()]

    def _reference(self, size: str | None, provisional: bool = False) -> list[Job]:
        if size not in self.refers:
            return []
        rates = self._rates(size, [self.plan.baseline], provisional)
        return [Job("reference", UNIFORM, self.plan.seeds[0], lr, size) for lr in rates.values()]

    def _rates(self, size: str | None, arms: Iterable[str], provisional: bool) -> dict[str, float]:
        return {
            arm: self._chosen.get((size, arm), _rounded(self.configs.lr(arm, size)))
            for arm in arms
            if provisional or self.plan.tune is None or (size, arm) in self._chosen
        }


def _rounded(lr: float) -> float:
    """Four digits: what a folder's name says is what the run has."""
    return float(f"{lr:.4g}")


def _wider(grid: tuple[float, ...], edge: str, tune: Tune) -> tuple[float, ...]:
    factor = tune.grid[1] / tune.grid[0]
    if edge == "low":
        least = tune.grid[0] / factor**EXTENSIONS
        return (grid[0] / factor, *grid) if grid[0] / factor > least / 1.01 else grid
    most = tune.grid[-1] * factor**EXTENSIONS
    return (*grid, grid[-1] * factor) if grid[-1] * factor < most * 1.01 else grid
