"""The nearest valid name, for errors."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# What other frameworks call it.
_OTHER_NAMES = {"learning_rate": "lr", "max_steps": "steps", "max_iters": "steps", "block_size": "model.context"}


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name that `name` was probably meant to be, or None.

    Names below the same dotted path are compared by their last part; a bare name may stand for a dotted one.
    """
    names = list(valid)
    tidy = name.replace("-", "_")
    tidy = next(iter(get_close_matches(tidy, _OTHER_NAMES, n=1, cutoff=0.85)), tidy)
    tidy = _OTHER_NAMES.get(tidy, tidy)
    if tidy in names:
        return tidy
    path, _, last = tidy.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == path}
    for pool, word, limit in (
        (siblings, last, cutoff),
        ({other: other for other in names if other.rpartition(".")[0] != path}, tidy, max(cutoff, 0.75)),
        ({other.rpartition(".")[2]: other for other in names}, last, max(cutoff, 0.75)),
    ):
        close = get_close_matches(word, list(pool), n=1, cutoff=limit)
        if close:
            return pool[close[0]]
    longer = [other for other in names if len(tidy) >= 3 and other.startswith(tidy)]
    return min(longer, key=len) if longer else None


def meant(name: str, valid: Iterable[str]) -> str:
    """The end of an error line: `; did you mean X?`, or nothing."""
    found = nearest(name, valid)
    return f"; did you mean {found}?" if found else ""
