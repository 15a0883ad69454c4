"""How names, paths and texts of a person reach the terminal: as they are, control characters spelled out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from softattn_lm.errors import visible


class _Plain(Console):
    """rich lets escape sequences in a text through; its own are no text, and pass."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:  # type: ignore[override]
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def plain_console(stderr: bool = False) -> Console:
    """A rich console that takes no text for its markup: a folder may be called [x] or :b:, in lines and in tables.

    The titles of panels are read as markup all the same, unless they are `rich.text.Text`.
    """
    return _Plain(highlight=False, markup=False, emoji=False, stderr=stderr)
