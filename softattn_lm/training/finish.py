"""The end of a finished run: its summary, and what a process that was killed behind the last checkpoint left undone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

from softattn_lm.config.settings import TrainerSettings, TrainingSettings
from softattn_lm.data import Prepared
from softattn_lm.runs.files import write_json
from softattn_lm.runs.processes import is_first_process
from softattn_lm.runs.status import read_status, write_status
from softattn_lm.training.checkpoint import load_run
from softattn_lm.training.describe import describe
from softattn_lm.training.fit import Fitted
from softattn_lm.training.launch import on_cuda
from softattn_lm.training.parts import Parts
from softattn_lm.training.prepared import opening
from softattn_lm.training.samples import append_sample, continued, has_sample
from softattn_lm.training.scores import write_scores
from softattn_lm.training.start import Start
from softattn_lm.training.telemetry import Telemetry
from softattn_lm.training.validation import validation_figures, windows_at_once


def summarised(folder: Path, steps: int) -> bool:
    """A damaged summary is none, and is written anew."""
    file = folder / "summary.json"
    try:
        summary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (ValueError, RecursionError):
        return False
    return isinstance(summary, dict) and summary.get("step") == steps and read_status(folder).get("state") == "finished"


def finish(folder: Path, start: Start, score: Sequence[str], parts: Parts, fitted: Fitted) -> dict[str, Any]:
    """The summary of a run that did its last step, "folder" included; on the first rank also in the run folder, with
    scores of the splits in `score` and the status "finished".
    """
    sizes, steps, prepared, spent = parts.sizes, parts.steps, parts.data.prepared, fitted.clock.seconds
    assert fitted.trainer.global_step == steps, (fitted.trainer.global_step, steps)
    per_second = (steps - start.step) * sizes["tokens_per_step"] / max(1e-9, spent - start.seconds)
    scores = {}
    if is_first_process() and score:
        sharded = isinstance(fitted.trainer.strategy, ModelParallelStrategy)
        whole = load_run(folder).model if sharded else parts.model
        scores = write_scores(whole, prepared, score, folder, windows_at_once(whole), parts.lit.seen)
    summary = {
        "state": "finished",
        "folder": str(folder),
        "step": steps,
        "steps": steps,
        "parent": start.fork,
        "validation": {name: validation_figures(result) for name, result in parts.lit.validation.items()},
        "tokens": steps * sizes["tokens_per_step"],
        "seconds": spent,
        "tokens_per_second": per_second,
        "mfu": None if fitted.throughput is None else fitted.throughput.of(per_second).get("mfu"),
        "parameters": sizes["parameters"],
        "opening": prepared.tokenizer.decode(opening(prepared)),
        "flops_per_token": sizes["flops_per_token"],
        "attention": fitted.kernels,
        "telemetry": next((each.cost() for each in fitted.callbacks if isinstance(each, Telemetry)), None),
        "scores": scores,
        "fingerprint": prepared.fingerprint,
    }
    if is_first_process():
        # The folder may be moved, so it does not know where it is.
        _write(folder, {key: value for key, value in summary.items() if key != "folder"})
    return summary


def finish_killed(cfg: dict[str, Any], folder: Path, prepared: Prepared, start: Start) -> None:
    """What a process killed behind its last checkpoint did not come to: the last sample, scores, summary and status.

    What the probes cost is not known any more; tokens per second are those of the whole run.
    """
    loaded = load_run(folder)
    sizes = describe(loaded.model, cfg["batch_size"], start.step)
    training, begins = TrainingSettings(**cfg["training"]), opening(prepared)
    score, tokens = training.score, start.step * sizes["tokens_per_step"]
    if training.sample_every is not None and not has_sample(folder, start.step):
        _, text = continued(loaded.model, prepared.tokenizer, begins, cfg["seed"])
        append_sample(folder, start.step, text)
    summary = {
        "state": "finished",
        "step": start.step,
        "steps": start.step,
        "parent": start.fork,
        "validation": {"validation": {key: value for key, value in loaded.metrics.items() if key != "step"}},
        "tokens": tokens,
        "seconds": start.seconds,
        "tokens_per_second": tokens / max(1e-9, start.seconds),
        "mfu": None,
        "parameters": sizes["parameters"],
        "opening": prepared.tokenizer.decode(begins),
        "flops_per_token": sizes["flops_per_token"],
        "attention": loaded.model.explain_kernels("cuda" if on_cuda(TrainerSettings(**cfg["trainer"])) else "cpu"),
        "telemetry": None,
        "scores": write_scores(loaded.model, prepared, score, folder, windows_at_once(loaded.model)),
        "fingerprint": prepared.fingerprint,
    }
    _write(folder, summary)


def _write(folder: Path, summary: dict[str, Any]) -> None:
    write_json(folder / "summary.json", summary)
    write_status(folder, "finished", step=summary["step"], steps=summary["steps"], parent=summary["parent"])
