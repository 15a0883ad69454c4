"""The lock of a run folder: while one process trains in it, no other does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softattn_lm.errors import UserError
from softattn_lm.runs.names import run_name


@contextmanager
def in_hand(folder: Path) -> Iterator[None]:
    """While this process trains in `folder`, no other can. Raises UserError if one does already.

    The lock goes with the process, however it ends, and not on to loader processes, which may outlive it for seconds.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            raise UserError(
                f"run {run_name(folder)} is being trained by another process; wait for it, or stop it first"
            ) from None
        # Otherwise a file system that knows no locks.
    try:
        yield
    finally:
        os.close(file)


def is_in_hand(folder: Path) -> bool:
    """Whether another process trains in `folder` now, as far as this file system tells."""
    if os.name != "posix" or not (folder / "lock").is_file():
        return False
    import fcntl

    with (folder / "lock").open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
