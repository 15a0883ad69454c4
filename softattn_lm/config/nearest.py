"""The nearest valid name, for errors."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name that `name` was probably meant to be, or None. A dotted name may be found by its last part."""
    names = list(valid)
    tidy = name.replace("-", "_")
    if tidy in names:
        return tidy
    close = get_close_matches(tidy, names, n=1, cutoff=cutoff)
    if close:
        return close[0]
    longer = [other for other in names if len(tidy) >= 3 and other.startswith(tidy)]
    if longer:
        return min(longer, key=len)
    by_tail = {other.rsplit(".", 1)[-1]: other for other in names}
    close = get_close_matches(tidy.rsplit(".", 1)[-1], list(by_tail), n=1, cutoff=max(cutoff, 0.75))
    return by_tail[close[0]] if close else None


def meant(name: str, valid: Iterable[str]) -> str:
    """"; did you mean X?" or nothing: the end of an error line."""
    found = nearest(name, valid)
    return f"; did you mean {found}?" if found else ""
