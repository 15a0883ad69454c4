"""What a process that trains on a CPU does with memory that is free for a moment."""

from __future__ import annotations

import ctypes
import os
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's names for them in mallopt
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
LARGEST = 2**30  # bytes


def keep_freed_memory() -> bool:
    """Blocks below 1 GiB stay with the process when they are freed. Returns whether that was asked for.

    By itself glibc hands large ones back to the system, and the next step gets them anew, page by page. Left as it is
    where somebody has chosen, and where the C library is another. Peaks stay what they are.
    """
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return all(libc.mallopt(which, LARGEST) == 1 for which in (MMAP_THRESHOLD, TRIM_THRESHOLD))
