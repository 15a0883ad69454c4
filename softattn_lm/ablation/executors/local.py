"""Slots of this machine, kept busy with processes forked from a warm server."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from softattn_lm.ablation.executors.base import Ended, train_words
from softattn_lm.ablation.executors.slots import Slot
from softattn_lm.ablation.executors.warm import Warm, wait_until_gone

LOG = "log.txt"  # in a run folder: what the run printed


class Local:
    """folder: of the ablation; runs: the folder that it lies in."""

    waits = True

    def __init__(self, folder: Path, runs: Path, slots: list[Slot], warm: Warm, execution: Sequence[str] = ()) -> None:
        self.folder, self.runs, self.slots, self.warm, self.execution = folder, runs, slots, warm, list(execution)
        self._orders: dict[int, Slot] = {}

    def free(self) -> int:
        return sum(slot.run is None for slot in self.slots)

    def start(self, run: Path) -> None:
        slot = next(slot for slot in self.slots if slot.run is None)
        slot.run, slot.began = run, time.time()
        words = train_words(run.resolve(), self.runs.resolve(), self.execution)
        self._orders[self._order({"words": words, "log": str(run.resolve() / LOG)}, slot)] = slot

    def wait(self, seconds: float) -> list[Ended]:
        ended: list[Ended] = []
        deadline = time.monotonic() + seconds
        while not ended and self._orders and (left := deadline - time.monotonic()) > 0:
            rows = self.warm.answers(left)
            if rows is None:
                wait_until_gone(slot.pid for slot in self._orders.values() if slot.pid is not None)
                return [self._end(number, None) for number in list(self._orders)]
            for row in rows:
                if row["id"] in self._orders and "pid" in row:
                    self._orders[row["id"]].pid = row["pid"]
                elif row["id"] in self._orders:
                    ended.append(self._end(row["id"], row["code"], row["cpu"]))
        return ended

    def stop(self, kill: bool = False) -> None:
        for number in self._orders:
            self.warm.send({"signal": int(signal.SIGKILL if kill else signal.SIGINT), "id": number})

    def close(self) -> None:
        self.warm.close()

    def measure(self, job: Path, out: Path, log: Path) -> int | None:
        """The exit status of one process that measures an arm, alone: nothing else of ours runs meanwhile."""
        assert not self._orders, "measuring beside other runs measures them too"
        order = {"measure": str(job.resolve()), "out": str(out.resolve()), "log": str(log.resolve())}
        number = self._order(order, replace(self.slots[0], cpus=()))
        while (rows := self.warm.answers(60.0)) is not None:
            for row in rows:
                if row["id"] == number and "code" in row:
                    return int(row["code"])
        return None

    def _order(self, order: dict[str, Any], slot: Slot) -> int:
        place = {"environment": slot.environment(), "threads": slot.threads, "cpus": list(slot.cpus)}
        return self.warm.order(order | place)

    def _end(self, number: int, code: int | None, cpu: float | None = None) -> Ended:
        slot = self._orders.pop(number)
        assert slot.run is not None
        run = slot.run
        slot.ended(self.folder, code, cpu)
        return Ended(run, code)
