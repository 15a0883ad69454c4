"""From settings and prepared data to what is trained: model, batches, optimizer and schedule, built and checked before
anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from softattn_lm.config.build import build
from softattn_lm.config.settings import TrainingSettings
from softattn_lm.data import Prepared
from softattn_lm.data.module import TextDataModule
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.training.describe import describe
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.schedule import Schedule
from softattn_lm.training.validation import validation_set, windows_at_once


@dataclass(frozen=True)
class Parts:
    """Of a run of `steps` optimizer steps, of `accumulate` micro-batches each. sizes: those of `describe`.

    Lightning makes the optimizer that is used; this one is fresh, for its refusals and to compare a saved state with.
    """

    model: DecoderLM
    sizes: dict[str, Any]
    data: TextDataModule
    optimizer: Optimizer
    schedule: Schedule
    lit: LitGPT
    steps: int
    accumulate: int


def build_parts(cfg: dict[str, Any], prepared: Prepared, steps: int, first_step: int) -> Parts:
    """`first_step` steps are done already. Raises UserError or ValueError for settings that do not fit each other."""
    training, seed = TrainingSettings(**cfg["training"]), cfg["seed"]
    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=seed)
    sizes = describe(model, cfg["batch_size"], steps)
    val_batch_size = windows_at_once(model)
    data = TextDataModule(
        prepared,
        context=model.context,
        batch_size=cfg["batch_size"],
        steps=steps,
        seed=seed,
        sampling=cfg["data"].get("sampling", "permuted"),
        accumulate=training.accumulate,
        num_workers=training.num_workers,
        first_step=first_step,
        documents=model.packs_documents,
        val_batch_size=val_batch_size,
    )
    make_optimizer, schedule = build(cfg["optimizer"]), build(cfg["schedule"])
    optimizer = make_optimizer(model.parameter_roles())
    lit = LitGPT(
        model,
        optimizer=make_optimizer,
        schedule=schedule,
        steps=steps,
        accumulate=training.accumulate,
        seed=seed,
        compiled=training.compile,
        loss_chunk=training.loss_chunk,
        checkpoint_activations=training.checkpoint_activations,
        nonfinite=training.nonfinite,
        max_skipped=training.max_skipped,
        validation_sets=[validation_set(prepared, each) for each in data.validation_names],
        val_batch_size=val_batch_size,
    )
    return Parts(model, sizes, data, optimizer, schedule, lit, steps, training.accumulate)
