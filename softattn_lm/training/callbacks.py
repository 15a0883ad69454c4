"""What looks on while a run is trained: rows, progress, probes, samples, checkpoints, signals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console

from softattn_lm.config.settings import TrainingSettings
from softattn_lm.evaluation.telemetry import Probe, make_probe
from softattn_lm.training.break_even import BreakEven
from softattn_lm.training.checkpoints import Checkpoints
from softattn_lm.training.console import RunConsole
from softattn_lm.training.interrupt import Interrupt
from softattn_lm.training.metrics import Clock, Metrics
from softattn_lm.training.parts import Parts
from softattn_lm.training.prepared import opening
from softattn_lm.training.progress import ProgressReport
from softattn_lm.training.samples import Samples
from softattn_lm.training.telemetry import Telemetry
from softattn_lm.training.throughput import Throughput


def make_callbacks(
    folder: Path,
    console: Console,
    clock: Clock,
    contents: dict[str, Any],
    parts: Parts,
    throughput: Throughput | None,
) -> list[Callback]:
    """In the order in which Lightning calls them: rows are written before they are shown, and both before a
    checkpoint. `contents`: entries of "softattn" in its checkpoints, "config" among them.
    """
    cfg, tokens_per_step = contents["config"], parts.sizes["tokens_per_step"]
    training, prepared = TrainingSettings(**cfg["training"]), parts.data.prepared
    metrics = Metrics(
        folder,
        clock,
        log_every=training.log_every,
        tokens_per_step=tokens_per_step,
        throughput=throughput,
    )
    checkpoints = Checkpoints(
        folder,
        metrics,
        clock,
        contents,
        accumulate=training.accumulate,
        val_every=training.val_every,
        save_every=training.save_every,
        keep_steps=training.keep_steps,
        validates=bool(parts.lit.validation_sets),
    )
    interrupt = Interrupt(checkpoints, lambda: isinstance(console, RunConsole) and console.nobody_reads)
    probe = _probe(parts) if training.telemetry else None
    samples = []
    if training.sample_every is not None:
        samples.append(
            Samples(
                folder,
                console,
                clock,
                prepared.tokenizer,
                opening(prepared),
                every=training.sample_every,
                seed=cfg["seed"],
                unfinished=lambda: checkpoints.unvalidated,
            )
        )
    return [
        metrics,
        ProgressReport(console, metrics, clock, tokens_per_step=tokens_per_step),
        *([] if probe is None else [Telemetry(metrics, clock, probe, compiled=training.compile)]),
        *([BreakEven(console, clock, tokens_per_step)] if training.compile else []),
        *samples,
        checkpoints,
        interrupt,
    ]


def _probe(parts: Parts) -> Probe | None:
    """None where nothing was held back to look at."""
    data, model = parts.data, parts.model
    if not data.validation_names:
        return None
    held_back = data.prepared.splits[data.validation_names[0]]
    documents = held_back.documents if model.packs_documents else None
    return make_probe(held_back.tokens, model.context, model.vocab_size, documents)
