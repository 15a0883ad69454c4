"""The warm server of softattn_lm/commands/worker.py, as the one sees it who gives it orders."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from softattn_lm.ablation.executors.base import WORKER
from softattn_lm.errors import UserError

CLOSING = 90.0  # seconds that the server has for ending; its processes save first


class Process(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start_server(orders: socket.socket, modules: Sequence[str], inherited: Sequence[int]) -> Process:
    """`orders`: the server's end of the socket; `inherited`: descriptors that it and its processes hold."""
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, "--serve", str(orders.fileno()), *modules],
        pass_fds=[orders.fileno(), *inherited],
        start_new_session=True,  # Ctrl-C is the planner's to hand on
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


class Warm:
    """Started with the first order. `modules`: what it imports beside `train`."""

    def __init__(self, modules: Sequence[str] = (), inherited: Sequence[int] = ()) -> None:
        self.modules, self.inherited = list(modules), list(inherited)
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._received = b""
        self._count = 0

    def order(self, order: dict[str, Any]) -> int:
        """Forks a process that does it; the number under which `answers` speak of it."""
        if self._socket is None:
            mine, its = socket.socketpair()
            self._process = start_server(its, self.modules, self.inherited)
            its.close()
            self._socket, self._received = mine, b""
        self._count += 1
        self.send(order | {"id": self._count, "directory": os.getcwd()})
        return self._count

    def send(self, row: dict[str, Any]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(row).encode() + b"\n")
        except OSError:
            return  # the server has gone, and `answers` is about to say so

    def answers(self, seconds: float) -> list[dict[str, Any]] | None:
        """What came within `seconds`; None when the server has gone, and the next order starts another.

        Raises UserError for a server that never came up.
        """
        assert self._socket is not None and self._process is not None
        if not select.select([self._socket], [], [], seconds)[0]:
            return []
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if data:
            *lines, self._received = (self._received + data).split(b"\n")
            return [json.loads(line) for line in lines]
        self._socket.close()
        self._socket = None
        if (code := self._process.wait()) > 0:
            raise UserError(f"the processes of this ablation could not be started: {WORKER} ended with status {code}")
        return None

    def close(self) -> None:
        """Closing the socket interrupts what still runs; the server ends when all have saved."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(CLOSING)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def wait_until_gone(pids: Iterable[int]) -> None:
    """Processes that are no children of ours have saved and ended, or are killed: two must never share a run."""
    deadline = time.monotonic() + CLOSING
    for pid in pids:
        while _lives(pid):
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
