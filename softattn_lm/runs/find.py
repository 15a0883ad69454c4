"""Which run a person means, by a path, a name or the beginning of one."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from softattn_lm.errors import UserError
from softattn_lm.runs.names import run_name, runs_folder


def find_run(text: str | None, root: str | Path) -> Path:
    """The run a person means: a path, a name below `root`, or the beginning of exactly one name. None is the newest
    run that has a checkpoint.

    Raises UserError with the nearest name when there is no such run, or with the candidates when there are several.
    Names in it are paths below `root`, as the jobs of two sweeps may be called alike.
    """
    root = runs_folder(root)
    folders = run_folders(root)
    trained = [folder for folder in folders if (folder / "checkpoints" / "last.ckpt").is_file()]
    newest = max(trained or folders, key=lambda folder: (_written(folder), folder.name), default=None)
    if text is None:
        if newest is None:
            raise UserError(f"there is no run below {root} yet; train one with: python scripts/train.py")
        if not trained:
            raise UserError(
                f"no run below {root} has saved a checkpoint yet; the newest is {run_name(newest, root)}, "
                "and resume= continues it"
            )
        return newest
    given = Path(os.path.expanduser(text))
    for folder in (Path(text), given, root / text):
        if (folder / "config.yaml").is_file():
            return folder
    for folder in (Path(text), given, root / text) if text else ():
        if folder.is_dir() and not any(folder.iterdir()):
            raise UserError(f"{folder} is an empty folder and no run: it has no config.yaml")
    if given.suffix == ".ckpt" and given.is_file():
        raise UserError(f"{text} is a checkpoint; type the run's folder: {given.parent.parent}")
    names = {folder: run_name(folder, root) for folder in folders}
    beginning = [folder for folder in folders if text and (folder.name.startswith(text))]
    beginning = beginning or [folder for folder in folders if text and names[folder].startswith(text)]
    if len(beginning) == 1:
        return beginning[0]
    if beginning:
        some = ", ".join(names[folder] for folder in beginning[:6])
        raise UserError(f"run {text!r} could be any of {len(beginning)}: {some}; type more of the name")
    spelt = {folder.name: name for folder, name in names.items()} | {name: name for name in names.values()}
    near = difflib.get_close_matches(text, spelt, n=1, cutoff=0.4)
    if near:
        hint = f"did you mean {spelt[near[0]]}?"
    else:
        hint = f"the newest is {names[newest]}" if newest is not None else "there are none yet: python scripts/train.py"
    raise UserError(f"no run {text!r} below {root}; {hint}")


def run_folders(root: Path) -> list[Path]:
    """All below `root` that hold a config, jobs of sweeps included; none that is only being made."""
    return sorted(
        folder
        for above in _folders(root)
        for folder in (above, *_folders(above))
        if os.path.isfile(folder / "config.yaml")
    )


def _folders(place: Path) -> list[Path]:
    """In `place`, but for those that are only being made; none where it vanished in the meantime or may not be read."""
    try:
        with os.scandir(place) as entries:
            return [place / entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []


def _written(run: Path) -> int:
    """When its config was, ns; 0 for a run that vanished in the meantime."""
    try:
        return (run / "config.yaml").stat().st_mtime_ns
    except OSError:
        return 0
