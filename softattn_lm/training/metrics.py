"""metrics.jsonl: the record of a run, one row per optimizer step and per validation, whatever the logger.

    {"kind": "train", "step": 12, "loss": .., "grad_norm": .., "lr": .., "tokens": .., "seconds": ..}
    {"kind": "validation", "name": "validation", "step": .., "loss": .., "loss_se": .., "perplexity": ..,
     "bits_per_byte": .., "tokens": .., "seconds": ..}
    {"kind": "telemetry", "step": .., "layer": .., "head": .., ..}    see training/telemetry.py

loss: nats per token. tokens: trained on so far; in validation rows the ones predicted. seconds: spent training so far,
without validation, sampling and saving, and added up over continuations. The last of the rows that are written at once
says {"tokens_per_second": .., "mfu": ..} since the one before, see training/throughput.py. A number that is not
finite is written as null.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from softattn_lm.runs.files import replace_text
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.training.lit import LitGPT, StepResult
from softattn_lm.training.throughput import Throughput


class Clock:
    """Seconds of training, with pauses taken out."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._spent, self._since, self._pauses = seconds, None, 0

    _since: float | None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._spent += time.perf_counter() - self._since
            self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()

    @property
    def seconds(self) -> float:
        return self._spent + (0.0 if self._since is None else time.perf_counter() - self._since)


class Metrics(Callback):
    """Collects the step results and writes them every `log_every` steps, before validations and before checkpoints.

    Losses are read from the device only then. `flushed`: the latest written row, for the progress bar.
    """

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        log_every: int,
        tokens_per_step: int,
        throughput: Throughput | None = None,
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self.clock, self.log_every, self.tokens_per_step = clock, log_every, tokens_per_step
        self.throughput = throughput
        self.flushed: dict[str, Any] = {}
        self._waiting: list[tuple[StepResult, float]] = []
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step
        if self.throughput is not None:
            self.throughput.step, self.throughput.seconds = trainer.global_step, self.clock.seconds
        self.clock.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        result = pl_module.last_step
        if result is None or result.step <= self._last:
            return  # inside an accumulation window
        self._last = result.step
        self._waiting.append((result, self.clock.seconds))
        if result.step % self.log_every == 0 or result.step == pl_module.steps:
            self.flush(trainer)

    def flush(self, trainer: Trainer) -> None:
        """Write what is waiting; all ranks must come here together."""
        if not self._waiting:
            return
        values = torch.stack([torch.stack((r.loss.float(), r.grad_norm.float())) for r, _ in self._waiting])  # (N, 2)
        if trainer.world_size > 1:
            values = trainer.strategy.reduce(values, reduce_op="mean")  # norms are the same on all ranks
        rows = []
        for (result, seconds), (loss, norm) in zip(self._waiting, values.tolist(), strict=True):
            rows.append(
                {
                    "kind": "train",
                    "step": result.step,
                    "loss": _finite(loss),
                    "grad_norm": _finite(norm),
                    "lr": result.lr,
                    "tokens": result.step * self.tokens_per_step,
                    "seconds": round(seconds, 4),
                }
            )
        if self.throughput is not None:
            rows[-1] |= self.throughput.figures(self._waiting[-1][0].step, self._waiting[-1][1])
        self._waiting = []
        self.write(trainer, rows)
        self.flushed = rows[-1]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What was learned up to a fault is told. Several ranks cannot count on meeting here."""
        if trainer.world_size == 1 and not isinstance(exception, OSError):
            self.flush(trainer)

    def make_durable(self, trainer: Trainer) -> None:
        """Before a checkpoint, which must not outlive the rows that lead to it."""
        if trainer.is_global_zero and self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self.clock.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        rows = [
            {
                "kind": "validation",
                "name": name,
                "step": trainer.global_step,
                "loss": _finite(result.nats_per_token),
                "loss_se": _finite(result.standard_error),
                "perplexity": _finite(result.perplexity),
                "bits_per_byte": None if result.bits_per_byte is None else _finite(result.bits_per_byte),
                **({} if result.accuracy is None else {"accuracy": result.accuracy}),
                "tokens": result.tokens,
                "seconds": round(self.clock.seconds, 4),
            }
            for name, result in pl_module.validation.items()
        ]
        self.write(trainer, rows)
        self.clock.start()

    def write(self, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
        """One append of whole lines, then the loggers (wandb), on the first rank only."""
        if not trainer.is_global_zero:
            return
        self.append(rows)
        for logger in trainer.loggers:
            for row in rows:
                kind = row["name"] if row["kind"] == "validation" else "train"
                named = {f"{kind}/{key}": v for key, v in row.items() if isinstance(v, (int, float)) and key != "step"}
                logger.log_metrics(named, step=row["step"])

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Whole lines, in one write: of a process that is killed in it, at most the last line is torn."""
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with self.path.open("ab", buffering=0) as file:
            if file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_csv(folder: Path) -> None:
    """metrics.csv: the rows of metrics.jsonl as a table, with the columns in the order they first appear; those of
    telemetry, which share no column with them, are telemetry.csv.
    """
    rows = read_metrics(folder)
    inner = [row for row in rows if row["kind"] == "telemetry"]
    tables = {"metrics.csv": [row for row in rows if row["kind"] != "telemetry"]}
    for name, table in (tables | ({"telemetry.csv": inner} if inner else {})).items():
        columns = list(dict.fromkeys(key for row in table for key in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(table)
        replace_text(folder / name, text.getvalue())
