"""The config tree on disk: where it is, which groups and choices it has, and what its comments say."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

PACKAGE = Path(__file__).resolve().parents[1]

_KEY_LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?P<value>[^#]*?)(?:\s+#\s*(?P<comment>.*))?$")


def config_folder() -> Path:
    """The folder of configs: the one packed into the wheel, else the one of the checkout."""
    packed = PACKAGE / "configs"
    return packed if packed.is_dir() else PACKAGE.parent / "configs"


@cache
def groups(folder: Path) -> tuple[str, ...]:
    """Every group, nested ones with a slash: ("attention", ..., "model", "model/size", ...)."""
    folders = (path for path in folder.rglob("*") if path.is_dir() and any(path.glob("*.yaml")))
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folders))


def choices(folder: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (folder / group).glob("*.yaml"))


def comments(file: Path) -> list[str]:
    """The lines of comment that a yaml file opens with."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            found.append(line.lstrip("# ").strip())
        if line and not line.startswith("#"):
            break
    return found


def first_comment(file: Path) -> str:
    """The one line that says what a yaml file is; "" where it has none."""
    return next(iter(comments(file)), "")


def defaults(file: Path) -> dict[str, str | None]:
    """Group -> default choice, in the order of the defaults list of a command's yaml."""
    found: dict[str, str | None] = {}
    for entry in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults", []):
        if isinstance(entry, dict):
            for group, choice in entry.items():
                found[group.removeprefix("optional ")] = choice
    return found


def commented_keys(file: Path) -> list[tuple[str, str, str]]:
    """(dotted key, default, comment) of each leaf of a yaml file, in its order; the defaults list is left out."""
    found: list[tuple[str, str, str]] = []
    section = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        match = _KEY_LINE.match(line)
        if match is None:
            continue
        key, value, comment = match["key"], match["value"].strip(), match["comment"] or ""
        if match["indent"]:
            if section:
                found.append((f"{section}.{key}", value, comment))
        elif value:
            section = ""
            found.append((key, value, comment))
        else:
            section = "" if key == "defaults" else key
    return found


def command_groups(folder: Path, command: str) -> list[str]:
    """The groups a command composes, and the groups nested in them: what `group=choice` may name."""
    own = list(defaults(folder / f"{command}.yaml"))
    return [group for name in own for group in (name, *(g for g in groups(folder) if g.startswith(name + "/")))]
