"""Which signals end a run, with what exit status, and how one leaves while there is nothing to save. No torch.

SIGINT   130   Ctrl-C
SIGTERM  143
SIGUSR1  143   what SLURM sends ahead of a time limit (sbatch --signal=USR1@120): the job is requeued as well
SIGHUP   129   the terminal was closed; ignored where it was ignored before, as under nohup
SIGPIPE  141   nobody reads what the run says, as behind `| head`: told by the console, never by the system
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Not every system has all of them.
_HANGUP: tuple[int, ...] = tuple(filter(None, [getattr(signal, "SIGHUP", None)]))
REQUEUE: tuple[int, ...] = tuple(filter(None, [getattr(signal, "SIGUSR1", None)]))
SIGNALS = (signal.SIGINT, signal.SIGTERM, *REQUEUE, *_HANGUP)
NOBODY_READS = 13


class Left(SystemExit):
    """A signal came where there was nothing to save. `number`: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_status(number))
        self.number = number


def asks_to_requeue(number: int) -> bool:
    return number in REQUEUE


def exit_status(number: int) -> int:
    """As above: SIGUSR1 ends a run as SIGTERM does."""
    return 128 + (signal.SIGTERM if number in REQUEUE else number)


def signal_name(number: int) -> str:
    return signal.Signals(number).name


def to_handle() -> list[int]:
    """A hang-up that is ignored is none of ours: nohup asked for that."""
    return [n for n in SIGNALS if n not in _HANGUP or signal.getsignal(n) != signal.SIG_IGN]


def let_a_second_end(number: int) -> None:
    """The next signal of the kind does what it always did. A hang-up comes twice by itself: the shell and the system
    both tell a process that its terminal has gone."""
    if number not in _HANGUP:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def signals_end_the_run() -> Iterator[None]:
    """Before and after training proper, the others leave at once, by `Left`, as Ctrl-C does by itself.

    Whatever is done to the handlers inside, ours and Lightning's own, is undone at the end.
    """
    if threading.current_thread() is not threading.main_thread():  # signals can be handled nowhere else
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Left(number)

    before = {number: signal.getsignal(number) for number in to_handle()}
    for number in before:
        if number != signal.SIGINT:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
