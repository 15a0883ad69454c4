"""How far an ablation is, over all of its runs: a bar on a terminal, a plain line about every ten seconds elsewhere.
And what a dry run prints.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from softattn_lm.ablation.forecast import Seconds, expected, measured_alone, seconds_left
from softattn_lm.ablation.jobs import Job
from softattn_lm.ablation.matching import Costs, Residual
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.stages import Stages
from softattn_lm.training.console import duration, plain_console

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """alone: seconds of a run as measured; what runs really take corrects them as they end. slots: None where runs wait
    in a queue, of which nobody knows how long it is.
    """

    def __init__(self, alone: Seconds, slots: int | None) -> None:
        self.alone, self.slots = alone, slots
        self.console = plain_console()
        self._spoke = float("-inf")
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = [TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}")]
            self._bar = Bar(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("", total=None, said="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, jobs: list[Job], done: set[str], running: dict[str, float], took: dict[str, float]) -> None:
        now = time.monotonic()
        if self._bar is None and now - self._spoke < SECONDS_BETWEEN_LINES:
            return
        left = ""
        if self.slots is not None:
            spent = {path: now - since for path, since in running.items()}
            seconds = seconds_left(jobs, done, spent, expected(jobs, self.alone, took), self.slots)
            left = f", {duration(seconds)} left"
        at_work = f"{len(running)} {'submitted' if self.slots is None else 'running'}"
        if self._bar is not None:
            said = f"{at_work}{left}"
            self._bar.update(self._task, total=len(jobs), completed=len(done), said=said)
        else:
            self._spoke = now
            self.say(f"{len(done)} of {len(jobs)} runs done, {at_work}{left}")

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)


def show_dry_run(
    plan: Plan, stages: Stages, costs: Costs, unfit: dict[str, str], slots: int, residuals: Sequence[Residual]
) -> None:
    """One row per arm and size, and how long all of it takes on this machine."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=plan.question or plan.name, box=SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
    heads = [
        "arm",
        "para-\nmeters",
        "FLOPs/\ntoken",
        "exe-\ncuted",
        "memory",
        "tokens\n/s",
        "steps",
        "runs",
        "mi-\nnutes",
    ]
    for head in heads:
        table.add_column(head, justify="left" if head == "arm" else "right", no_wrap=head == "arm")
    jobs = [job for job in stages.known() if job.arm not in unfit]
    alone = measured_alone(plan, costs)
    for size, arms in costs.items():
        for arm, cost in arms.items():
            runs = sum(job.arm == arm and job.size == size and job.stage != "reference" for job in jobs)
            each = alone[size, arm] / 60
            table.add_row(
                arm if size is None else f"{arm} {size}", f"{cost['parameters_without_embeddings']:,}",
                f"{cost['flops_per_token']:,}", f"{cost['executed_flops_per_token']:,.0f}",
                f"{cost['peak_memory_bytes'] / 2**20:,.0f} MiB", f"{cost['tokens_per_second']:,.0f}",
                f"{cost['steps']:,}", str(runs), f"{runs * each:.1f}",
            )  # fmt: skip
    for job in (job for job in jobs if job.stage == "reference"):
        name, steps = job.arm if job.size is None else f"{job.arm} {job.size}", costs[job.size][plan.baseline]["steps"]
        table.add_row(name, *[""] * 5, f"{steps:,}", "1", f"{alone[job.size, job.arm] / 60:.1f}")
    console = plain_console()
    console.print(table)
    for arm, reason in unfit.items():
        console.print(f"{arm}: {reason}", soft_wrap=True)
    for residual in residuals:
        console.print(str(residual), soft_wrap=True)
    done = sum(stages.outcome(job).end in ("finished", "diverged") for job in jobs)
    minutes = seconds_left(jobs, set(), {}, expected(jobs, alone, {}), slots) / 60
    said = f"{len(jobs)} runs, {done} of them done; all take about {minutes:.1f} minutes in {slots} slot(s)"
    if plan.budget_minutes is not None:
        said += f"; the budget is {plan.budget_minutes:g} minutes"
    console.print(f"{said}. Nothing was trained.", soft_wrap=True)
