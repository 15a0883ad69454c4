"""Places for runs on this machine: each has its own threads or devices and a port of its own.

<folder>/slots.jsonl: a row per run, {"slot", "run", "pid", "port", "devices", "cpus", "start", "end", "code",
"cpu"}.
start, end: seconds since 1970. cpu: seconds of processors that it used.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from softattn_lm.ablation.executors.base import cores
from softattn_lm.errors import UserError

FILE = "slots.jsonl"


@dataclass
class Slot:
    """devices: ids of the graphics processors that its runs see; none on a CPU. port: for the processes of one run.
    cpus: cores that its runs are kept on; none where they may wander.
    """

    number: int
    threads: int
    port: int
    devices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
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
            "cpus": list(self.cpus),
            "start": self.began,
            "end": time.time(),
            "code": code,
            "cpu": cpu,
        }
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.run = self.pid = None


def make_slots(slots: int | None, threads: int | None, per_run: int, on_gpu: bool, pin: bool = False) -> list[Slot]:
    """per_run: devices of one run. Without `slots` all devices, or all cores with one thread each, are used. pin: the
    cores are shared out, and a run stays on those of its slot.

    Raises UserError where a run asks for more devices than there are.
    """
    ports = free_ports(slots or cores())
    if not on_gpu:
        n = slots or max(1, cores() // (threads or 1))
        each = threads or max(1, cores() // n)
        kept = core_sets(n, each * per_run) if pin else [()] * n
        return [Slot(number, each, ports[number], cpus=kept[number]) for number in range(n)]
    devices = graphics_processors()
    n = min(slots or len(devices) // per_run, len(devices) // per_run)
    if n < 1:
        raise UserError(f"trainer.devices={per_run}, and this machine has {len(devices)}; type trainer=cpu")
    each = threads or max(1, cores() // n)
    ports = free_ports(n)
    kept = core_sets(n, each) if pin else [()] * n
    return [Slot(i, each, ports[i], tuple(devices[i * per_run : (i + 1) * per_run]), kept[i]) for i in range(n)]


def core_sets(n: int, least: int) -> list[tuple[int, ...]]:
    """As many cores for each of n as there are; none where that is less than `least`, or the system keeps nobody."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    share = len(usable) // n
    return [tuple(usable[i * share : (i + 1) * share]) if share >= least else () for i in range(n)]


def use(folder: Path, n: int, since: float) -> str | None:
    """How well `n` slots were used by the runs that started at `since` or later; None where none has ended.

    What is beside the training of a run: starting, building, scoring, saving. A run that was continued does not count,
    as its seconds are those of several processes.
    """
    file = folder / FILE
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    now = [row for row in rows if row["run"] is not None and row["start"] >= since]
    if not now:
        return None
    times = Counter(row["run"] for row in rows)
    spent = [row["end"] - row["start"] for row in now]
    whole = n * (max(row["end"] for row in now) - min(row["start"] for row in now))
    said = f"{'slots were' if n > 1 else 'the slot was'} busy {100 * sum(spent) / max(whole, 1e-9):.0f} % of the time"
    beside = [
        took - trained
        for row, took in zip(now, spent, strict=True)
        if times[row["run"]] == 1 and (trained := _trained(folder / row["run"])) is not None
    ]
    return f"{said}, {sum(beside) / len(beside):.1f} s per run beside its training" if beside else said


def _trained(run: Path) -> float | None:
    """Seconds, as its summary has them."""
    file = run / "summary.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("seconds") if file.is_file() else None
    return None if found is None else float(found)


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
