"""Ctrl-C, SIGTERM and SIGUSR1: finish the optimizer step, save, leave. A second one ends the process as it always did.

A validation is left in the middle, and done again as a whole when the run goes on.
"""

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

# SIGUSR1 is what SLURM sends ahead of a time limit (sbatch --signal=USR1@120). Not every system has it.
REQUEUE: tuple[int, ...] = tuple(filter(None, [getattr(signal, "SIGUSR1", None)]))
SIGNALS = (signal.SIGINT, signal.SIGTERM, *REQUEUE)


def asks_to_requeue(number: int) -> bool:
    return number in REQUEUE


def exit_status(number: int) -> int:
    """130 for Ctrl-C and 143 for the others: SIGUSR1 ends a run as SIGTERM does."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


@contextmanager
def signals_end_the_run() -> Iterator[None]:
    """Before and after training proper, SIGTERM and SIGUSR1 leave at once, by SystemExit, as Ctrl-C does by itself.

    Whatever is done to the handlers inside, ours and Lightning's own, is undone at the end.
    """
    if threading.current_thread() is not threading.main_thread():  # signals can be handled nowhere else
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(exit_status(number))

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS[1:]:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt(Callback):
    """The handler only sets a flag: saving inside one would meet a step half done, and a collective that other ranks
    are not in.

    Ranks agree on the flag after each optimizer step and before each validation batch. `interrupted` is the signal's
    number once the run has left for it.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.interrupted: int | None = None
        self._received: int | None = None
        self._last = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

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
        number = self._received or 0
        if trainer.world_size > 1:
            flag = torch.tensor(float(number), device=module.device)
            number = int(trainer.strategy.reduce(flag, reduce_op="max"))
        self.interrupted = number or None
        return self.interrupted
