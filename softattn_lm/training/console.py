"""How names, paths and texts of a person reach the terminal: as they are."""

from __future__ import annotations

from rich.console import Console


def plain_console() -> Console:
    """A rich console that takes no text for its markup: a folder may be called [x] or :b:, in lines and in tables.

    The titles of panels are read as markup all the same, unless they are `rich.text.Text`.
    """
    return Console(highlight=False, markup=False, emoji=False)
