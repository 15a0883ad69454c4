"""Real processes that can be killed, out of a server that has imported everything once: a start costs milliseconds.

The server is the one of tests/ranks.py. It has one thread (OMP_NUM_THREADS=1), as a fork keeps no other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.tiny_run import TINY, text

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ranks_preload"])


class Child:
    """`softattn train` with `words`, in `folder`, in a process group of its own. `sabotage()` is called in it first: a
    function of tests/sabotage.py. What it prints goes to `file` there, and is `said`."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        sabotage: Callable[..., None] | None = None,
        arguments: tuple[Any, ...] = (),
        environment: dict[str, str] | None = None,
        file: str = "said.txt",
    ) -> None:
        self.file = folder / file
        environment = dict(os.environ) | (environment or {})
        given = (folder, self.file, list(words), sabotage, arguments, environment)
        self.process: BaseProcess = _CONTEXT.Process(target=_run, args=given)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def said(self) -> str:
        return self.file.read_text(encoding="utf-8") if self.file.exists() else ""

    def wait(self, seconds: float = 60.0) -> int:
        """The exit status as a shell shows it: 128 + n for signal n. What lives longer is killed, and fails the
        test."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still there after {seconds} s: {self.said[-2000:]}")
        code = self.process.exitcode
        return 128 - code if code < 0 else code

    def when(self, there: Callable[[], bool], seconds: float = 60.0) -> None:
        """Waits until `there()`, while the process lives."""
        deadline = time.monotonic() + seconds
        while not there():
            assert self.process.exitcode is None, f"ended with {self.process.exitcode}: {self.said[-2000:]}"
            assert time.monotonic() < deadline, self.said[-2000:]
            time.sleep(0.005)

    def signal(self, number: int, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)


def _run(
    folder: Path,
    said: Path,
    words: list[str],
    sabotage: Callable[..., None] | None,
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.setsid()
    # As in a process started by hand: loader workers are forks. Here they would ask for another server.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from softattn_lm.cli import main

    if sabotage is not None:
        sabotage(*arguments)
    main("train", words)


def tiny_words(folder: Path, *overrides: str) -> list[str]:
    """What to type for the run of tests/tiny_run.py; its text in `folder`, its run folders below folder/runs."""
    file = folder / "text.txt"
    if not file.exists():
        file.write_text(text(), encoding="utf-8")
    replaced = {override.partition("=")[0] for override in overrides}
    base = [word for word in TINY if word.partition("=")[0] not in replaced]
    return [*base, f"data.path={file}", *overrides]
