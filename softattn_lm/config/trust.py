"""Which code outside this package may run: what a person typed on this command line, or trusted earlier.

A run folder or checkpoint may name a custom target too, and may come from a stranger. It is never asked.

    trusted.txt, in the person's own config folder: one target a line, its file with the whole path
    SOFTATTN_TRUSTED: what was typed, for the processes that a sweep or a launcher starts
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from softattn_lm.config.raw import decode
from softattn_lm.errors import UserError

TYPED = "SOFTATTN_TRUSTED"


def trust_file() -> Path:
    """Imported when first needed: most commands name no code of one's own."""
    from platformdirs import user_config_path

    return user_config_path("softattn_lm", appauthor=False) / "trusted.txt"


def resolved(target: str) -> str:
    """`my_kernel.py:Mine` with the whole path of the file; `package.module:Mine` as it is."""
    place, colon, name = target.rpartition(":")
    return f"{Path(place).expanduser().resolve()}{colon}{name}" if place.endswith(".py") else target


def trust_typed(overrides: Sequence[str]) -> None:
    """Trusts the targets among a command line's overrides; `trust=` also for the future, in the file."""
    for word in overrides:
        key, _, value = word.partition("=")
        path = key.lstrip("+").split(".")
        if path == ["trust"] and value != "null":
            _remember(resolved(decode(value)))
        elif path[0] == "attention" and path[-1] == "target":
            typed = {*os.environ.get(TYPED, "").splitlines(), resolved(decode(value))}
            os.environ[TYPED] = "\n".join(sorted(typed - {""}))


def require_trusted(target: str) -> None:
    """Raises UserError, with what to type, unless a person of this machine named the target."""
    known = os.environ.get(TYPED, "").splitlines()
    file = trust_file()
    if file.is_file():
        known += file.read_text(encoding="utf-8").splitlines()
    if resolved(target) not in known:
        raise UserError(
            f"attention.target={target} is code outside softattn_lm, {resolved(target)}, and would run here; "
            f"if you know it, add {shlex.quote(f'trust={target}')} to this command once"
        )


def _remember(target: str) -> None:
    place = target.rpartition(":")[0]
    if not place or (place.endswith(".py") and not Path(place).is_file()):
        raise UserError(f"trust={target}: there is no such file; write file.py:Name, or package.module:Name")
    file = trust_file()
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    if target not in lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*lines, target, ""]), encoding="utf-8")
