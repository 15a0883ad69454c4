"""One line with a bar and the time left, for work that takes longer than two seconds; silence otherwise.

Where standard error is no terminal the line has no bar and appears once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

AFTER = 2.0  # seconds


class Task:
    """Counts bytes; the bar appears on standard error once the work has lasted `AFTER` seconds."""

    def __init__(self, title: str, total: int | None, shown: bool) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.shown = shown
        self.began = time.monotonic()
        self.bar: Bar | None = None
        self.row: TaskID | None = None

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.bar is not None and self.row is not None:
            self.bar.update(self.row, completed=self.done)
        elif self.shown and time.monotonic() - self.began > AFTER:
            self._show()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, markup=False, emoji=False)  # a title holds names of files
        if not console.is_terminal:
            console.print(f"{self.title} ..." if self.total is None else f"{self.title}, {self.total / 1e6:.0f} MB ...")
            self.shown = False  # a log file needs one line
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True)
        self.row = self.bar.add_task(self.title, total=self.total, completed=self.done)
        self.bar.start()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class Progress:
    """Hands out tasks; `shown=False` keeps them silent."""

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown

    @contextmanager
    def task(self, title: str, total: int | None) -> Iterator[Task]:
        """`total` in bytes, None if nobody knows."""
        task = Task(title, total, self.shown)
        try:
            yield task
        finally:
            task.close()
