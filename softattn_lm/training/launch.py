"""From settings to a Lightning Trainer, and what Lightning says by the way kept quiet."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy

from softattn_lm.config.settings import TrainerSettings, TrainingSettings
from softattn_lm.errors import UserError
from softattn_lm.training.checkpoint_io import AtomicCheckpointIO


def make_trainer(
    settings: TrainerSettings,
    training: TrainingSettings,
    folder: Path,
    *,
    steps: int,
    validates: bool,
    callbacks: list[Callback],
    loggers: list[Logger],
    unused_parameters: bool = False,
) -> Trainer:
    """One long epoch of `steps` optimizer steps. All that Lightning would do by itself, and we do, is off."""
    plugins: list[object] = [AtomicCheckpointIO()]
    if SLURMEnvironment.detect():
        # Its requeueing saves from inside a signal handler, in the middle of a step.
        plugins.append(SLURMEnvironment(auto_requeue=False))
    trainer = Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=_strategy(settings, unused_parameters),
        precision={"float32": "32-true", "bfloat16": "bf16-mixed"}[training.precision],  # type: ignore[arg-type]
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip or None,
        val_check_interval=training.val_every * training.accumulate if validates else None,  # in micro-batches
        check_val_every_n_epoch=None if validates else 1,
        limit_val_batches=None if validates else 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the data module divides the batch itself
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=loggers or False,
        callbacks=callbacks,
        plugins=plugins,  # type: ignore[arg-type]
        default_root_dir=folder,
    )
    # Lightning's handler of SIGTERM begins a collective wherever the program stands, and the other ranks are elsewhere.
    trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
    return trainer


def _nothing() -> None:
    pass


def check_device(settings: TrainerSettings) -> None:
    """Raises UserError if the device asked for is not on this machine, or another number of processes was started."""
    if settings.accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError(
            "trainer.accelerator=gpu, but torch finds no CUDA device here; type trainer=cpu or trainer=auto"
        )
    if settings.accelerator == "mps" and not torch.backends.mps.is_available():
        raise UserError("trainer.accelerator=mps, but torch finds no Apple graphics processor here; type trainer=cpu")
    if SLURMEnvironment.detect():
        started, here = os.environ.get("SLURM_NTASKS"), os.environ.get("SLURM_NTASKS_PER_NODE")
    else:
        started, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    devices = _devices(settings)
    if started is not None and int(started) != devices * settings.num_nodes:
        # Each would train by itself, all of them in one run folder.
        n, per_node = int(started), int(here or started)
        strategy = "fsdp" if settings.strategy == "fsdp" else "ddp"
        raise UserError(
            f"torchrun or srun started {n} process(es), but trainer.devices={devices} × "
            f"trainer.num_nodes={settings.num_nodes} is {devices * settings.num_nodes}; type trainer={strategy} "
            f"trainer.devices={per_node} trainer.num_nodes={n // per_node}"
        )


def _devices(settings: TrainerSettings) -> int:
    """Of this machine."""
    if isinstance(settings.devices, int):
        return settings.devices
    return torch.cuda.device_count() if on_cuda(settings) else 1


def device_count(settings: TrainerSettings) -> int:
    """Of all machines."""
    return _devices(settings) * settings.num_nodes


def on_cuda(settings: TrainerSettings) -> bool:
    return settings.accelerator in ("auto", "gpu") and torch.cuda.is_available()


def _strategy(settings: TrainerSettings, unused_parameters: bool) -> str | Strategy:
    devices = device_count(settings)
    if settings.strategy == "fsdp":
        return ModelParallelStrategy(
            data_parallel_size=devices,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend="nccl" if on_cuda(settings) else "gloo",
        )
    if settings.strategy == "auto" and devices == 1:
        return "auto"
    # DDP otherwise waits for gradients that never come.
    return "ddp_find_unused_parameters_true" if unused_parameters else "ddp"


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's notes (what hardware there is, what it would recommend) are left out, its warnings of faults are not.

    The notes are log records of level INFO and warnings of the one category PossibleUserWarning.
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities")]
    before = [logger.level for logger in loggers]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        # Lightning 2.6 calls this torch function by its old name.
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        # A block hands its values on, which are views; nothing is done to them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
