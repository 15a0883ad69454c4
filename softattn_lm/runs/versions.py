"""versions.json of a run: what it was computed with."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from softattn_lm import __version__


def versions() -> dict[str, Any]:
    """What this run was computed with; a package that is not installed is left out."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "softattn_lm": __version__,
    }
    for package in ("torch", "lightning", "hydra-core", "numpy", "datasets", "tokenizers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git_commit()
    if commit is not None:
        found["commit"] = commit
    return found


def _git_commit() -> str | None:
    """The commit of the checkout this package lies in, with "+changes" when files differ from it; None outside one."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        said = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
