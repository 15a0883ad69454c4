"""The classes a config may name: exactly those that the shipped yaml files name.

A run folder or checkpoint from a stranger holds a config too. It is compared with this list before anything is
imported, so that it can choose among our classes and nothing else (Hydra's own block-list lets builtins.open,
torch.load and others through).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError

_TARGET = re.compile(r"^\s*(?:-\s+)?_target_:\s*([\w.]+)\s*(?:#.*)?$", re.MULTILINE)

_PARTIAL = re.compile(r"^\s*_partial_:\s*true\s*(?:#.*)?$", re.MULTILINE)


@cache
def allowed_targets(folder: Path | None = None) -> frozenset[str]:
    """Read as text: nothing is resolved or imported. A user's own targets would be added here, and only here."""
    files = (folder or config_folder()).rglob("*.yaml")
    return frozenset(target for file in files for target in _TARGET.findall(file.read_text(encoding="utf-8")))


@cache
def partial_targets() -> frozenset[str]:
    """Those that wait for more arguments: `_partial_: true` stands beside them."""
    texts = [file.read_text(encoding="utf-8") for file in config_folder().rglob("*.yaml")]
    return frozenset(target for text in texts if _PARTIAL.search(text) for target in _TARGET.findall(text))


def require_allowed(path: str, target: Any) -> None:
    """Raises UserError unless `target` is one of the names in the shipped configs."""
    if not isinstance(target, str) or target not in allowed_targets():
        raise UserError(f"{path}._target_ is {target!r}, which no config of softattn_lm names; it is not built")
