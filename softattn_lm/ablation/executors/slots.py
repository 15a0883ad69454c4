"""Places for runs on this machine: each has its own threads or devices and a port of its own.

<folder>/slots.jsonl: a row per run, {"slot", "run", "pid", "port", "devices", "start", "end", "code", "cpu"}.
start, end: seconds since 1970. cpu: seconds of processors that it used.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from softattn_lm.ablation.executors.base import cores
from softattn_lm.errors import UserError

FILE = "slots.jsonl"


@dataclass
class Slot:
    """devices: ids of the graphics processors that its runs see; none on a CPU. port: for the processes of one run."""

    number: int
    threads: int
    port: int
    devices: tuple[str, ...] = ()
    run: Path | None = None
    pid: int | None = None
    began: float = field(default=0.0)

    def environment(self) -> dict[str, str]:
        found = {"OMP_NUM_THREADS": str(self.threads), "MASTER_PORT": str(self.port)}
        return found | ({"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {})

    def ended(self, folder: Path, code: int | None, cpu: float | None) -> None:
        """Free again, and written down."""
        row: dict[str, object] = {"slot": self.number, "run": None, "pid": self.pid}
        if self.run is not None:
            row["run"] = os.path.relpath(self.run, folder)
        row |= {
            "port": self.port,
            "devices": list(self.devices),
            "start": self.began,
            "end": time.time(),
            "code": code,
            "cpu": cpu,
        }
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.run = self.pid = None


def make_slots(slots: int | None, threads: int | None, per_run: int, on_gpu: bool) -> list[Slot]:
    """per_run: devices of one run. Without `slots` all devices, or all cores with one thread each, are used.

    Raises UserError where a run asks for more devices than there are.
    """
    ports = free_ports(slots or cores())
    if not on_gpu:
        n = slots or max(1, cores() // (threads or 1))
        each = threads or max(1, cores() // n)
        return [Slot(number, each, ports[number]) for number in range(n)]
    devices = graphics_processors()
    n = min(slots or len(devices) // per_run, len(devices) // per_run)
    if n < 1:
        raise UserError(f"trainer.devices={per_run}, and this machine has {len(devices)}; type trainer=cpu")
    each = threads or max(1, cores() // n)
    ports = free_ports(n)
    return [Slot(i, each, ports[i], tuple(devices[i * per_run : (i + 1) * per_run])) for i in range(n)]


def graphics_processors() -> list[str]:
    """Ids of the CUDA devices that this process may use, asked without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each for each in visible.split(",") if each and each != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in said.splitlines()))]


def free_ports(n: int) -> Sequence[int]:
    """Different ones, as all are held until the last is found."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    try:
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
