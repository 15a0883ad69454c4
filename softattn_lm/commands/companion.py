"""What becomes of the processes that Lightning starts beside the first one of a run, one for each further device.

The first process makes the run folder, writes to it, speaks, and gives the command its exit status. Lightning kills it,
whatever it is doing, within five seconds of a companion that leaves with a status other than 0. Nothing tells a
companion that the first process has gone: it would wait for it at their meeting point for half an hour.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = "SOFTATTN_FIRST_PROCESS"  # its id
EVERY = 1.0  # seconds between looks
GRACE = 5.0  # seconds between the end of the first process and that of a companion which has not noticed


@contextmanager
def following_first(companion: bool) -> Iterator[None]:
    """A companion ends when the first process has gone, even in the middle of a wait for it."""
    done = threading.Event()
    if companion:
        threading.Thread(target=_follow, args=(done,), daemon=True, name="follow-first-process").start()
    try:
        yield
    finally:
        done.set()


def _follow(done: threading.Event) -> None:
    while not _first_has_gone():
        if done.wait(EVERY):
            return
    if not done.wait(GRACE):  # it may have finished a moment ago, and this one is about to
        print("the first process of this run has gone, and this one ends with it", file=sys.stderr, flush=True)
        os._exit(1)


def first_spoke() -> bool:
    """Whether the first process leaves within GRACE, as it does when it has found the same fault and said so."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if _first_has_gone():
            return True
        time.sleep(0.05)
    return False


def _first_has_gone() -> bool:
    return os.getppid() != int(os.environ[FIRST])
