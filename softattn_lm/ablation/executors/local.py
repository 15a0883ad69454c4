"""Slots of this machine, kept busy with processes forked from a warm server: see softattn_lm/commands/worker.py."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softattn_lm.ablation.executors.base import Ended, train_words
from softattn_lm.ablation.executors.slots import Slot
from softattn_lm.errors import UserError

WORKER = "softattn_lm.commands.worker"
LOG = "log.txt"  # in a run folder: what the run printed
CLOSING = 90.0  # seconds that the server has for ending; its processes save first


class Local:
    """folder: of the ablation; runs: the folder that it lies in. modules: what the server imports beside `train`.
    inherited: a file descriptor that every process holds, so that a lock on it lives as long as the last of them.
    """

    def __init__(
        self,
        folder: Path,
        runs: Path,
        slots: list[Slot],
        execution: Sequence[str] = (),
        modules: Sequence[str] = (),
        inherited: int | None = None,
    ) -> None:
        self.folder, self.runs, self.slots, self.execution = folder, runs, slots, list(execution)
        self.modules, self.inherited = list(modules), inherited
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._received = b""
        self._orders: dict[int, Slot] = {}
        self._measured: dict[int, int | None] = {}
        self._count = 0

    def free(self) -> int:
        return sum(slot.run is None for slot in self.slots)

    def start(self, run: Path) -> None:
        slot = next(slot for slot in self.slots if slot.run is None)
        slot.run, slot.began = run, time.time()
        words = train_words(run.resolve(), self.runs.resolve(), self.execution)
        number = self._order({"words": words, "log": str(run.resolve() / LOG)}, slot)
        self._orders[number] = slot

    def wait(self, seconds: float) -> list[Ended]:
        ended: list[Ended] = []
        deadline = time.monotonic() + seconds
        while not ended and self._orders:
            left = deadline - time.monotonic()
            if left < 0:
                return []
            rows = self._answers(left)
            if rows is None:
                return self._lost()
            for row in rows:
                slot = self._orders.get(row["id"])
                if slot is not None and "pid" in row:
                    slot.pid = row["pid"]
                elif slot is not None:
                    ended.append(self._end(row["id"], row["code"]))
        return ended

    def stop(self, kill: bool = False) -> None:
        for number in self._orders:
            self._send({"signal": int(signal.SIGKILL if kill else signal.SIGINT), "id": number})

    def close(self) -> None:
        """Closing the socket interrupts what still runs; the server ends when all have saved."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            try:
                self._server.wait(CLOSING)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    def measure(self, job: Path, out: Path, log: Path) -> int | None:
        """The exit status of one process that measures an arm, alone: nothing else of ours runs meanwhile."""
        assert not self._orders, "measuring beside other runs measures them too"
        slot = self.slots[0]
        order = {"measure": str(job.resolve()), "out": str(out.resolve()), "log": str(log.resolve())}
        number = self._order(order, slot)
        while True:
            rows = self._answers(60.0)
            if rows is None:
                self._lost()
                return None
            for row in rows:
                if row["id"] == number and "code" in row:
                    return int(row["code"])

    # -- the server ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        mine, its = socket.socketpair()
        fds = [its.fileno(), *([] if self.inherited is None else [self.inherited])]
        self._server = subprocess.Popen(
            [sys.executable, "-m", WORKER, "--serve", str(its.fileno()), *self.modules],
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is the planner's to hand on
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        its.close()
        self._socket, self._received = mine, b""

    def _order(self, order: dict[str, Any], slot: Slot) -> int:
        if self._socket is None:
            self._begin()
        self._count += 1
        whole = order | {"id": self._count, "environment": slot.environment(), "threads": slot.threads}
        self._send(whole | {"directory": os.getcwd()})
        return self._count

    def _send(self, row: dict[str, Any]) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(json.dumps(row).encode() + b"\n")
        except OSError:
            return  # the server has gone, and `wait` is about to notice

    def _answers(self, seconds: float) -> list[dict[str, Any]] | None:
        """None when the server has gone."""
        assert self._socket is not None and self._server is not None
        if not select.select([self._socket], [], [], seconds)[0]:
            return []
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _lost(self) -> list[Ended]:
        """The server was killed: its processes are interrupted, and a new one is started when it is needed.

        Raises UserError for one that never came up.
        """
        assert self._server is not None and self._socket is not None
        code = self._server.wait()
        self._socket.close()
        self._server, self._socket = None, None
        if code > 0:
            raise UserError(f"the processes of this ablation could not be started: {WORKER} ended with status {code}")
        _wait_for([slot.pid for slot in self._orders.values() if slot.pid is not None])
        return [self._end(number, None) for number in list(self._orders)]

    def _end(self, number: int, code: int | None) -> Ended:
        slot = self._orders.pop(number)
        assert slot.run is not None
        run = slot.run
        slot.ended(self.folder, code)
        return Ended(run, code)


def _wait_for(pids: list[int]) -> None:
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
