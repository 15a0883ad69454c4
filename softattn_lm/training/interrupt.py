"""A signal: finish the optimizer step, save, leave. A second one ends the process as it always did.

A validation is left in the middle, and done again as a whole when the run goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from softattn_lm.training.checkpoints import Checkpoints
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.signals import NOBODY_READS, let_a_second_end, to_handle


class Interrupt(Callback):
    """The handler only sets a flag: saving inside one would meet a step half done, and a collective that other ranks
    are not in.

    Ranks agree on the flag after each optimizer step and before each validation batch. `interrupted` is the signal's
    number once the run has left for it. `nobody_reads`: whether what is said goes nowhere, which is taken for a signal.
    """

    def __init__(self, checkpoints: Checkpoints, nobody_reads: Callable[[], bool]) -> None:
        self.checkpoints, self._nobody_reads = checkpoints, nobody_reads
        self.interrupted: int | None = None
        self._received: int | None = None
        self._last = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            for number in to_handle():
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        let_a_second_end(number)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        validated = self.checkpoints.validated(step, pl_module.steps)
        if self._agreed(trainer, pl_module) is None or (step == pl_module.steps and not validated):
            return
        self.checkpoints.save(trainer, ["last"], unvalidated=validated)
        trainer.limit_val_batches = 0  # Lightning validates when it stops; here there is no time for that
        trainer.should_stop = True

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        if self._agreed(trainer, pl_module) is not None:
            pl_module.validation_cut = True
            raise StopIteration  # which ends Lightning's loop over the batches, and nothing else

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        if pl_module.validation_cut:
            self.checkpoints.save(trainer, ["last"], unvalidated=True)
            trainer.should_stop = True

    def _agreed(self, trainer: Trainer, module: LightningModule) -> int | None:
        number = self._received or NOBODY_READS * self._nobody_reads()
        if trainer.world_size > 1:
            flag = torch.tensor(float(number), device=module.device)
            number = int(trainer.strategy.reduce(flag, reduce_op="max"))
        self.interrupted = number or None
        return self.interrupted
