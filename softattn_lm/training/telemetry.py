"""Attention while it learns: evaluation/telemetry.py on one fixed probe, before the first step and at validations.

Rows of metrics.jsonl, one per layer and head, and means over heads for the loggers:

    {"kind": "telemetry", "step": 250, "layer": 0, "head": 3, "entropy": .., "entropy_ratio": .., "support": .., ...}

Training steps pay nothing for it: the hooks exist while the probe runs only.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from softattn_lm.evaluation.telemetry import Probe, per_layer, telemetry
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.metrics import Clock, Metrics


class Telemetry(Callback):
    """`seconds`, `validation_seconds`: what the probes at validations took, and the validations themselves."""

    def __init__(self, metrics: Metrics, clock: Clock, probe: Probe, *, compiled: bool = False) -> None:
        self.metrics, self.clock, self.probe, self.compiled = metrics, clock, probe, compiled
        self.seconds, self.validation_seconds, self.validations = 0.0, 0.0, 0
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self.measure(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        if pl_module.validation_cut:
            return
        began = time.perf_counter()
        self.measure(trainer, pl_module)
        self.validations += 1
        self.validation_seconds += began - self._began
        self.seconds += time.perf_counter() - began

    def measure(self, trainer: Trainer, module: LightningModule) -> None:
        """Divided parameters (FSDP) are gathered by all ranks together, so then all of them probe; one writes."""
        assert isinstance(module, LitGPT)
        if not trainer.is_global_zero and not isinstance(trainer.strategy, ModelParallelStrategy):
            return
        with self.clock.paused(), self._not_compiled():
            found = telemetry(module.model, self.probe)
        if trainer.is_global_zero:
            step = trainer.global_step
            self.metrics.append([{"kind": "telemetry", "step": step, **row} for row in found])
            figures = {
                f"telemetry/layer{layer}/{name}": value
                for layer, whole in per_layer(found).items()
                for name, value in whole.items()
                if value is not None
            }
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def _not_compiled(self) -> AbstractContextManager[Any]:
        """A compiled model would be compiled once more with the hooks in it."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def cost(self) -> dict[str, float] | None:
        """Seconds of an average probe and of an average validation; None before the first."""
        if not self.validations:
            return None
        return {
            "seconds": self.seconds / self.validations,
            "validation_seconds": self.validation_seconds / self.validations,
        }
