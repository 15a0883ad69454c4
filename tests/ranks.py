"""Processes that train together, named as torchrun names them, out of a server that has imported everything once.

A start costs some milliseconds; `python -m softattn_lm` twice costs ten seconds and more.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ranks_preload"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(n: int, said: Path, target: Callable[..., Any], *arguments: Any) -> list[BaseProcess]:
    """`target(*arguments)` in `n` processes. What rank r prints goes to the file `said`/rank<r>."""
    said.mkdir(parents=True, exist_ok=True)
    _start_server()
    port = free_port()
    processes = [_CONTEXT.Process(target=_run, args=(r, n, port, said, target, arguments)) for r in range(n)]
    for process in processes:
        process.start()
    return processes


def _start_server() -> None:
    # Python 3.11 hands its path on to the processes and not to the server, which then silently imports nothing.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _run(rank: int, ranks: int, port: int, said: Path, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    with (said / f"rank{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        target(*arguments)


def command(words: list[str]) -> None:
    """`softattn train` with `words`."""
    from softattn_lm.cli import main

    main("train", words)


def wait(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes once all have ended, negative for a signal. What still lives after `seconds` is killed: None."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes
