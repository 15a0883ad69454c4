"""Ablations so small that a run trains for a fraction of a second, asked as on a command line."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from softattn_lm.ablation.executors import warm
from softattn_lm.ablation.executors.base import WORKER
from softattn_lm.cli import main
from softattn_lm.commands import ablate as command
from softattn_lm.commands import worker
from tests.tiny_run import text
from tests.warm import _CONTEXT

TINY = [
    *(
        "trainer=cpu",
        "logger=none",
        "data=text_file",
        "tokenizer=char",
        "data.val_fraction=0.1",
        "data.test_fraction=0.1",
    ),
    *("model.n_layer=1", "model.n_head=2", "model.d_model=16", "model.context=16", "batch_size=8"),
    *("steps=8", "training.val_every=8", "training.log_every=4", "lines=false"),
]


def words(folder: Path, *typed: str, here: bool = False) -> list[str]:
    """What to type: TINY where it is not typed, on a text in `folder`; runs below folder/runs. here: typed in it."""
    file = folder / "text.txt"
    if not file.exists():
        file.write_text(text(3000), encoding="utf-8")
    given = {word.partition("=")[0] for word in typed}
    base = [word for word in TINY if word.partition("=")[0] not in given]
    places = ["data.path=text.txt", "runs=runs"] if here else [f"data.path={file}", f"runs={folder / 'runs'}"]
    return [*base, *places, *typed]


def ablate(folder: Path, *typed: str) -> int:
    """The exit status of `ablate`, in this process."""
    try:
        main("ablate", words(folder, *typed))
    except SystemExit as stop:
        return int(stop.code or 0)


def started(folder: Path, *typed: str) -> subprocess.Popen[str]:
    """`ablate` in a process that can be stopped and killed, typed in `folder`."""
    command = [sys.executable, "-m", "softattn_lm", "ablate", *words(folder, *typed, here=True)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )


class Forked:
    """A warm server out of the one of tests/warm.py, which has imported everything already."""

    def __init__(self, orders: socket.socket, modules: Sequence[str]) -> None:
        self.process = _CONTEXT.Process(target=_serve, args=(orders, list(modules), dict(os.environ)))
        self.process.start()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("server", timeout or 0.0)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablations of this process start their runs out of the server of tests/warm.py, and write no report."""
    monkeypatch.setattr(warm, "start_server", forked_server)
    monkeypatch.setattr(command, "make_report", lambda _: None)


def forked_server(orders: socket.socket, modules: Sequence[str], inherited: Sequence[int]) -> Forked:
    return Forked(orders, modules)


def _serve(orders: socket.socket, modules: list[str], environment: dict[str, str]) -> None:
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()
    os.environ.update(environment)
    # Lightning starts the processes of other devices as this one was started.
    sys.modules["__main__"].__spec__ = find_spec(WORKER)
    worker.Server(orders).serve()
    os._exit(0)


def losses(folder: Path, split: str = "test") -> dict[str, float]:
    """Path of each finished run of the report stage -> its loss."""
    found = {}
    for file in sorted(folder.glob("report/**/summary.json")):
        scores = json.loads(file.read_text(encoding="utf-8"))["scores"]
        found[file.parent.relative_to(folder).as_posix()] = scores[split]["loss"]
    return found


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
