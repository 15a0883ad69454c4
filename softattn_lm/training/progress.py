"""Where a run is: a bar on a terminal, a plain line about every ten seconds elsewhere. On the first rank only."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from softattn_lm.training.console import duration
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.metrics import Clock, Metrics

SECONDS_BETWEEN_LINES = 10.0


class ProgressReport(Callback):
    """Shows what `metrics` has written: it never asks the device for a loss by itself."""

    def __init__(self, console: Console, metrics: Metrics, clock: Clock, *, tokens_per_step: int) -> None:
        self.console, self.metrics, self.clock, self.tokens_per_step = console, metrics, clock, tokens_per_step
        self._bar: Progress | None = None
        self._task: Any = None
        self._first = (0, 0.0)  # steps and seconds before this process began
        self._shown = 0
        self._spoke = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        self._first = (trainer.global_step, self.clock.seconds)
        self._shown, self._spoke = trainer.global_step, time.monotonic()
        if trainer.is_global_zero and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=pl_module.steps, completed=trainer.global_step, said="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        step = trainer.global_step
        if not trainer.is_global_zero or step == self._shown:
            return
        self._shown = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, said=self._said(step))
        elif time.monotonic() - self._spoke >= SECONDS_BETWEEN_LINES:
            self._spoke = time.monotonic()
            left = (pl_module.steps - step) * self._seconds_per_step(step)
            self.console.print(
                f"step {step}/{pl_module.steps}  {self._said(step)}  {duration(left)} left", highlight=False
            )

    def _seconds_per_step(self, step: int) -> float:
        steps, seconds = self._first
        return (self.clock.seconds - seconds) / max(1, step - steps)

    def _said(self, step: int) -> str:
        loss = self.metrics.flushed.get("loss")
        shown = "" if loss is None else f"loss {loss:.4f}  "
        return f"{shown}{self.tokens_per_step / max(1e-9, self._seconds_per_step(step)):,.0f} tokens/s"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        if trainer.is_global_zero:
            for name, result in pl_module.validation.items():
                said = (
                    f"step {trainer.global_step}  {name} loss {result.nats_per_token:.4f} ± {result.standard_error:.4f}"
                )
                said += "" if result.accuracy is None else f", {result.accuracy:.1%} of its answers right"
                self.console.print(said, highlight=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
