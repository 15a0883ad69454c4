"""A warm fork server for the runs of an ablation: it has imported everything once, and forks one process per run.

    python -m softattn_lm.commands.worker --serve FD [module ...]     the server; FD: a socket to who gives orders
    python -m softattn_lm.commands.worker --failed RUN                tells the tracker of a run that it was killed
    python -m softattn_lm.commands.worker WORD ...                    what one of its processes does: `train WORD ...`

Orders and answers are lines of JSON.
    <-  {"id": 3, "words": ["resume=..."], "log": "run/log.txt", "environment": {...}, "threads": 1,
         "cpus": [0]}
    <-  {"id": 4, "measure": "job.yaml", "out": "arm.json", ...}      {"signal": 2, "id": 3}
    ->  {"id": 3, "pid": 812}       {"id": 3, "code": 0, "cpu": 1.2}
code: exit status, negative for the signal that ended it. cpu: seconds of processors. cpus: cores it is kept on.

The server runs no tensor operation, so no thread pool has begun when it forks: one that had would be missing in the
child, which would wait for it for ever. Each process has a session of its own, and may start others (trainer=ddp).
When who gives orders has gone, the processes are interrupted as by Ctrl-C: they save, and the server ends after them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from softattn_lm.errors import UserError, visible

GRACE = 60.0  # seconds that interrupted processes have for saving
_PR_SET_PDEATHSIG = 1


class Server:
    def __init__(self, orders: socket.socket) -> None:
        self.orders = orders
        self.running: dict[int, int] = {}  # process id -> id of the order
        self._received = b""

    def serve(self) -> None:
        """Until the other end of the socket is closed and all processes have ended."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        self.wakeup = (read, write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        listening, deadline = True, float("inf")
        while listening or self.running:
            ready, _, _ = select.select([read, *([self.orders.fileno()] if listening else [])], [], [], 1.0)
            if read in ready:
                os.read(read, 4096)
            if self.orders.fileno() in ready and not self._read_orders():
                listening, deadline = False, time.monotonic() + GRACE
                self._signal_all(signal.SIGINT)
            if time.monotonic() > deadline:
                self._signal_all(signal.SIGKILL)
            self._reap()

    def _read_orders(self) -> bool:
        try:
            data = self.orders.recv(1 << 16)
        except ConnectionError:
            return False
        if not data:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return True

    def _obey(self, order: dict[str, Any]) -> None:
        if "signal" in order:
            for pid in [pid for pid, number in self.running.items() if number == order["id"]]:
                _kill_group(pid, order["signal"])
            return
        pid = os.fork()
        if pid == 0:
            self._become(order)
        self.running[pid] = order["id"]
        self._answer({"id": order["id"], "pid": pid})

    def _become(self, order: dict[str, Any]) -> NoReturn:
        """The forked process: it leaves only by os._exit, or it would go on as a second server."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            for fd in (*self.wakeup, self.orders.fileno()):
                os.close(fd)
            code = _run(order)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except UserError as error:
            print(visible(f"error: {error}"), file=sys.stderr)
            code = 2
        finally:
            if code == 70 and sys.exc_info()[1] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self.running:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self.running.pop(pid, None)
            if os.WIFSIGNALED(status):
                _kill_group(pid, signal.SIGKILL)  # what it has started: other ranks, its tracker
            if number is not None:
                cpu = round(used.ru_utime + used.ru_stime, 3)
                self._answer({"id": number, "code": os.waitstatus_to_exitcode(status), "cpu": cpu})

    def _answer(self, row: dict[str, Any]) -> None:
        try:
            self.orders.sendall(json.dumps(row).encode() + b"\n")
        except OSError:
            return  # nobody listens any more, and the loop is about to notice

    def _signal_all(self, number: int) -> None:
        for pid in self.running:
            _kill_group(pid, number)


def _kill_group(pid: int, number: int) -> None:
    """The whole session of a run for SIGKILL; else its first process, which tells the others."""
    try:
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):  # gone, or about to be
        return


def _run(order: dict[str, Any]) -> int:
    os.setsid()
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if "directory" in order:
        os.chdir(order["directory"])
    os.environ.update(order.get("environment", {}))
    if order.get("cpus"):
        os.sched_setaffinity(0, order["cpus"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    import torch

    torch.set_num_threads(order["threads"])
    if "measure" in order:
        from softattn_lm.commands.measure_arm import measure_arm

        measure_arm(Path(order["measure"]), Path(order["out"]))
        return 0
    # Lightning starts the processes of other devices by the words of this one.
    sys.argv = [sys.argv[0], *order["words"]]
    from softattn_lm.cli import main

    main("train", order["words"])


def _end_with_parent() -> None:
    """Linux: interrupted when the server is killed, so that no run lives on unseen. Elsewhere the lock tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _import_everything(modules: list[str]) -> None:
    import importlib

    for name in (
        "softattn_lm.cli",
        "softattn_lm.commands.train",
        "softattn_lm.training.run",
        "softattn_lm.training.optim",
        *modules,
    ):
        importlib.import_module(name)
    # What wandb.init imports by and by takes a second of processors, in every run.
    for name in ("wandb.sdk.launch", "requests") if "wandb" in modules else ():
        with suppress(ImportError):  # another version has other insides
            importlib.import_module(name)
    from softattn_lm.config.check import check
    from softattn_lm.config.compose import compose
    from softattn_lm.config.tree import config_folder

    check(compose("train", [], config_folder()), "TrainSettings")
    gc.collect()
    gc.freeze()  # or every child would copy what the collector touches


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        orders = socket.socket(fileno=int(sys.argv[2]))
        _import_everything(sys.argv[3:])
        Server(orders).serve()
    elif sys.argv[1:2] == ["--failed"]:
        from softattn_lm.runs.config import read_config
        from softattn_lm.training.tracking import mark_failed

        mark_failed(Path(sys.argv[2]), read_config(Path(sys.argv[2])))
    else:
        from softattn_lm.cli import main as command

        command("train", sys.argv[1:])


if __name__ == "__main__":
    main()
