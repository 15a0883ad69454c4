"""How names, paths and texts of a person reach the terminal: as they are, control characters spelled out."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from softattn_lm.errors import visible


class _Plain(Console):
    """rich lets escape sequences in a text through; its own are no text, and pass."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> None:
        """rich would leave with a status of its own. Called where the BrokenPipeError is caught."""
        raise


class RunConsole(_Plain):
    """Of a run, which has more to lose than its words: what cannot be shown (no reader, no terminal, a full disk) is
    not, from then on. `nobody_reads`: the reader of a pipe has gone."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        self.nobody_reads = False

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self.quiet = True
            self.nobody_reads = isinstance(error, BrokenPipeError)
            # Python would try again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def plain_console(stderr: bool = False) -> Console:
    """A rich console that takes no text for its markup: a folder may be called [x] or :b:, in lines and in tables.

    The titles of panels are read as markup all the same, unless they are `rich.text.Text`.
    """
    return _Plain(highlight=False, markup=False, emoji=False, stderr=stderr)


def duration(seconds: float) -> str:
    """42 -> "42s", 200 -> "3m20s", 4000 -> "1h06m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
