"""What the planner asks of an executor."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WORKER = "softattn_lm.commands.worker"


@dataclass(frozen=True)
class Ended:
    """code: exit status, negative for the signal that ended the process, None where nobody knows."""

    run: Path
    code: int | None

    @property
    def reason(self) -> str:
        if self.code is None:
            return "its process was lost"
        if self.code < 0:
            return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"exit status {self.code}"


class Executor(Protocol):
    """`train resume=<run>` for run folders that are there. waits: `wait` tells of their ends; else whoever started them
    leaves, and the same command goes on when they have ended."""

    waits: bool

    def free(self) -> int:
        """How many more runs may start now."""
        ...

    def start(self, run: Path) -> None: ...

    def wait(self, seconds: float) -> list[Ended]:
        """Runs that have ended since it was last asked; returns at once when there are some."""
        ...

    def stop(self, kill: bool = False) -> None:
        """Interrupts all runs, which save and end; `kill`: at once. `wait` tells of their ends."""
        ...

    def close(self) -> None: ...


def train_words(run: Path, runs: Path, execution: Sequence[str]) -> list[str]:
    """What one types to start or continue the run in this folder. `execution`: on what, and what is written down."""
    return [f"resume={run}", f"runs={runs}", *execution]


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
