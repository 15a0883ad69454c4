"""Ctrl-C and SIGTERM: finish the optimizer step, save, leave. A second signal ends the process as it always did."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from softattn_lm.training.checkpoints import Checkpoints
from softattn_lm.training.lit import LitGPT

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Whatever is done to the handlers inside, ours and Lightning's own, is undone at the end."""
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


class Interrupt(Callback):
    """The handler only sets a flag: saving inside one would meet a step half done, and a collective that other ranks
    are not in.

    Ranks agree on the flag after each optimizer step. `interrupted` is the signal's number once the run has left for
    it.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.interrupted: int | None = None
        self._received: int | None = None
        self._last = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step
        if threading.current_thread() is threading.main_thread():  # signals can be handled nowhere else
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        number = self._agreed(trainer, pl_module)
        if number is None or step == pl_module.steps:
            return
        self.interrupted = number
        if not self.checkpoints.validated(step, pl_module.steps):
            self.checkpoints.save(trainer, ["last"])
            trainer.limit_val_batches = 0  # Lightning validates when it stops; here there is no time for that
        trainer.should_stop = True

    def _agreed(self, trainer: Trainer, module: LightningModule) -> int | None:
        number = self._received or 0
        if trainer.world_size > 1:
            flag = torch.tensor(float(number), device=module.device)
            number = int(trainer.strategy.reduce(flag, reduce_op="max"))
        return number or None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interrupted is not None:  # a validation was due at this very step, and comes before the checkpoint
            self.checkpoints.save(trainer, ["last"])
