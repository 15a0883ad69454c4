"""Whether a run folder holds its own files: a stranger's could lead what is written there to a file somewhere else.

Asked once by every command before it writes into a run folder. Standard library only.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from softattn_lm.errors import UserError

FOLDERS = ("checkpoints", "scores", "wandb")
# What we write or read, by its name: it must be a plain file. Others may be anything but a link.
FILES = re.compile(
    r"lock|samples\.txt|metrics\.jsonl|.*\.(json|yaml|csv|ckpt|npz)|telemetry\.(png|svg)|.*\.\d+\.tmp|id", re.DOTALL
)
# wandb makes these itself, and puts new ones in their place.
LINKS_OF_WANDB = ("latest-run", "debug.log", "debug-internal.log", "debug-cli.log")


def require_own_files(folder: Path) -> None:
    """Raises UserError for a link in a run folder, and for what is no plain file where we write one.

    The folder itself may be reached through a link. A folder of ours that may not be read holds nothing.
    """
    for place in (folder, *(folder / name for name in FOLDERS)):
        for entry in _entries(place):
            if entry.is_symlink():
                if place.name != "wandb" or entry.name not in LINKS_OF_WANDB:
                    raise UserError(
                        f"{entry.path} is a link to {os.readlink(entry.path)}, and a run is not written through links; "
                        "put what it leads to in its place, or remove it"
                    )
            elif place == folder and entry.name in FOLDERS:
                if not entry.is_dir():
                    raise UserError(f"{entry.path} is no folder, and the run keeps files in one; move it away")
            elif FILES.fullmatch(entry.name) and not _is_plain(entry):
                raise UserError(f"{entry.path} is no plain file, and the run writes one there; move it away")


def _entries(place: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(place) as entries:
            yield from sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return


def _is_plain(entry: os.DirEntry[str]) -> bool:
    """False for folders, pipes and devices; a file that vanished in the meantime was one."""
    try:
        return stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return True
