"""Training itself: Lightning around the parts of a run, and what looks on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from rich.console import Console

from softattn_lm.config.settings import LoggerSettings, TrainerSettings, TrainingSettings
from softattn_lm.data.module import micro_batch_size
from softattn_lm.runs.processes import is_first_process
from softattn_lm.training.break_even import not_compiled
from softattn_lm.training.callbacks import make_callbacks
from softattn_lm.training.interrupt import Interrupt
from softattn_lm.training.launch import device_count, make_trainer, on_cuda, quiet
from softattn_lm.training.memory import keep_freed_memory
from softattn_lm.training.metrics import Clock
from softattn_lm.training.parts import Parts
from softattn_lm.training.schedule import unfinished_warmup
from softattn_lm.training.start import Start, last_checkpoint
from softattn_lm.training.throughput import Throughput, peak_flops
from softattn_lm.training.tracking import finish_loggers, make_loggers


@dataclass(frozen=True)
class Fitted:
    """What has trained. kernels: those of `DecoderLM.explain_kernels` on its device. clock: the whole run's."""

    trainer: Trainer
    callbacks: list[Callback]
    clock: Clock
    throughput: Throughput | None
    kernels: list[str]

    @property
    def interrupted(self) -> int | None:
        """The number of the signal for which it left."""
        return next(each for each in self.callbacks if isinstance(each, Interrupt)).interrupted


def fit(
    folder: Path,
    start: Start,
    contents: dict[str, Any],
    parts: Parts,
    console: Console,
    progress: dict[str, int],
) -> Fitted:
    """Train to the last step or to a signal. `contents`: entries of "softattn" in checkpoints, "config" among them.
    `progress["step"]` tells how far it came, however it ended.
    """
    cfg, model, steps = contents["config"], parts.model, parts.steps
    training, settings = TrainingSettings(**cfg["training"]), TrainerSettings(**cfg["trainer"])
    clock, throughput = Clock(start.seconds), _throughput(training, settings, parts.sizes)
    callbacks = make_callbacks(folder, console, clock, contents, parts, throughput)
    with quiet():
        loggers = make_loggers(LoggerSettings(**cfg["logger"]), folder, cfg)
        trainer = make_trainer(
            settings,
            # A run whose last validation alone is left to do: Lightning would find it finished.
            replace(training, val_every=steps) if start.step == steps else training,
            folder,
            steps=steps + (start.step == steps),
            validates=bool(parts.lit.validation_sets),
            callbacks=callbacks,
            loggers=loggers,
            unused_parameters=not all(block.attention.kernel.reads_scores for block in model.layers),
        )
        micro_batch_size(cfg["batch_size"], trainer.num_devices * trainer.num_nodes, training.accumulate)
        kernels = model.explain_kernels(trainer.strategy.root_device.type)
        if trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        _say_what_begins(folder, start, parts, kernels, console)
        try:
            last = last_checkpoint(folder) if start.step else None
            trainer.fit(parts.lit, datamodule=parts.data, ckpt_path=last, weights_only=True)
        except RuntimeError as error:
            fault = not_compiled(error) if training.compile else None
            if fault is None:
                raise
            raise fault from error
        finally:
            progress["step"] = trainer.global_step
            finish_loggers(loggers)
    return Fitted(trainer, callbacks, clock, throughput, kernels)


def _throughput(training: TrainingSettings, settings: TrainerSettings, sizes: dict[str, Any]) -> Throughput | None:
    if not training.throughput:
        return None
    peak = peak_flops(torch.device("cuda" if on_cuda(settings) else "cpu"))
    return Throughput(sizes["tokens_per_step"], sizes["flops_per_token"], peak, device_count(settings))


def _say_what_begins(folder: Path, start: Start, parts: Parts, kernels: list[str], console: Console) -> None:
    warning = unfinished_warmup(parts.schedule, parts.steps)
    if not is_first_process():
        return
    if warning is not None:
        console.print(warning, soft_wrap=True)
    for line in kernels:
        console.print(f"attention auto takes {line}", soft_wrap=True)
    sizes, prepared = parts.sizes, parts.data.prepared
    stored = prepared.splits["train"].n_tokens
    console.print(
        f"run {folder}: {sizes['parameters']:,} parameters, {f'{stored:,}' if stored else 'fresh'} training "
        f"tokens of {prepared.source}, steps {start.step} to {parts.steps} of {sizes['tokens_per_step']:,} tokens",
        soft_wrap=True,
    )
