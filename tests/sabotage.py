"""Faults for the processes of tests/warm.py: what a disk, a machine or a model may do to a run."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from softattn_lm.config import compose
from softattn_lm.training import checkpoint, checkpoints, run, slurm, validation
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.metrics import Metrics
from softattn_lm.training.samples import Samples


def slow_steps(seconds: float) -> None:
    """Each micro-batch takes that much longer."""
    real = LitGPT.training_step

    def slow(self: LitGPT, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(seconds)
        return real(self, batch, batch_idx)

    LitGPT.training_step = slow  # type: ignore[method-assign]


def terminal_closed(step: int) -> None:
    """The shell and the system both tell the process in optimizer step `step` (from 0) that its terminal has gone."""
    real = LitGPT.training_step

    def told(self: LitGPT, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        return real(self, batch, batch_idx)

    LitGPT.training_step = told  # type: ignore[method-assign]


def slow_validation(mark: Path, seconds: float) -> None:
    """A validation of many batches, each of which takes `seconds`; `mark` appears with the second."""
    real = LitGPT.validation_step

    def slow(self: LitGPT, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 1:
            mark.touch()
        time.sleep(seconds)
        real(self, batch, batch_idx, dataloader_idx)

    LitGPT.validation_step = slow  # type: ignore[method-assign]
    validation.VALIDATION_TOKENS = 16


def within_save(step: int, name: str, mark: Path, seconds: float) -> None:
    """The write of checkpoint `name` at `step` lasts `seconds`; half of the file is written, and `mark` there, in the
    meantime."""
    real = torch.save

    def slow(value: Any, file: Any) -> None:
        if value.get("global_step") == step and f"{name}.ckpt" in str(file.name):
            file.write(b"half a checkpoint")
            file.flush()
            mark.touch()
            time.sleep(seconds)
            file.seek(0)
            file.truncate()
        real(value, file)

    checkpoint.torch.save = slow  # type: ignore[assignment]


def die_before_link(name: str) -> None:
    """kill -9 between the write of `last` and that of `name`."""
    real = checkpoints._link

    def link(old: Path, new: Path) -> None:
        if new.stem == name:
            os.kill(os.getpid(), signal.SIGKILL)
        real(old, new)

    checkpoints._link = link  # type: ignore[assignment]


def small_files(n_bytes: int) -> None:
    """No file may grow beyond that: what a full disk does to the largest ones."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


def nobody() -> None:
    """A user without rights, where the suite runs as root."""
    os.setuid(65534)


def bad_micro_batch(micro_batches: list[int], layer: int, where: str = "forward") -> None:
    """At these micro-batches one block gives something that is not a number, or hands one back as gradient."""
    real = LitGPT.training_step

    def poisoned(module: Any, given: Any, output: Any) -> Any:
        found = output[0] if isinstance(output, tuple) else output
        bad = found * torch.nan if where == "forward" else _BadGradient.apply(found)
        return (bad, *output[1:]) if isinstance(output, tuple) else bad

    def step(self: LitGPT, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx in micro_batches:
            self.handle = self.model.blocks[layer].mlp.register_forward_hook(poisoned)
        loss = real(self, batch, batch_idx)
        return loss

    def after(self: LitGPT, *given: Any, real: Callable[..., Any] = LitGPT.optimizer_step) -> None:
        real(self, *given)
        if getattr(self, "handle", None) is not None:
            self.handle.remove()

    LitGPT.training_step, LitGPT.optimizer_step = step, after  # type: ignore[method-assign]


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.inf


def slow_data(mark: Path) -> None:
    """Preparing the text takes a minute."""

    def prepare(*given: Any) -> Any:
        mark.touch()
        time.sleep(60)

    run.prepared_data = prepare


def die_within_row(step: int) -> None:
    """kill -9 when half of the row of this step is written."""

    def append(self: Metrics, rows: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        torn = any(row["kind"] == "train" and row["step"] == step for row in rows)
        with self.path.open("ab", buffering=0) as file:
            file.write(lines[: len(lines) // 2] if torn else lines)
        if torn:
            os.kill(os.getpid(), signal.SIGKILL)

    Metrics.append = append  # type: ignore[method-assign]


def unread() -> None:
    """What the run says goes into a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)


def under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def slow_settings(mark: Path) -> None:
    """The settings take a minute to be read."""

    def wait(*given: Any) -> Any:
        mark.touch()
        time.sleep(60)

    compose.compose = wait


def die_behind_save(step: int) -> None:
    """kill -9 when the checkpoint of this step is written, and before anything else."""
    real = checkpoints.Checkpoints.save

    def save(self: checkpoints.Checkpoints, trainer: Any, *given: Any, **named: Any) -> None:
        real(self, trainer, *given, **named)
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.Checkpoints.save = save  # type: ignore[method-assign]


def die_in_last_sample() -> None:
    """kill -9 while the last sample is drawn."""

    def die(self: Samples, *given: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Samples.on_train_end = die  # type: ignore[method-assign]


def slow_mark() -> None:
    """Half a second passes between finding a run of an earlier life of the job and marking it."""
    real = slurm.remember

    def remember(*given: Any) -> None:
        time.sleep(0.5)
        real(*given)

    slurm.remember = remember
