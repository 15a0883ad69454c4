"""What a run goes on from: nothing, its own last checkpoint, or the one of another run that it forks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from softattn_lm.data import Prepared
from softattn_lm.errors import UserError
from softattn_lm.runs.config import write_config
from softattn_lm.runs.files import remove_left_over
from softattn_lm.runs.metrics import cut_metrics
from softattn_lm.runs.names import run_name
from softattn_lm.runs.processes import is_first_process
from softattn_lm.runs.status import write_status
from softattn_lm.training.budget import said_budget
from softattn_lm.training.checkpoint import read_checkpoint, write_checkpoint
from softattn_lm.training.checkpoints import complete_names
from softattn_lm.training.continued import (
    missing_rows,
    require_optimizer,
    require_same_settings,
    require_trainable,
    require_weights,
)
from softattn_lm.training.fork import lost_last, planted, read_parent
from softattn_lm.training.parts import Parts
from softattn_lm.training.prepared import require_same_text
from softattn_lm.training.samples import cut_samples

WAIT = 120.0  # seconds for the first of several processes to put a fork's first checkpoint in its place


@dataclass(frozen=True)
class Start:
    """What a run goes on from: `step` steps and `seconds` of training are done. unvalidated: the validation after
    `step` is not. parent: contents of the checkpoint that a fork begins with, before it has one of its own; `fork` is
    its name. saved: those of a continued run's.
    """

    step: int = 0
    seconds: float = 0.0
    unvalidated: bool = False
    parent: dict[str, Any] | None = None
    fork: str | None = None
    saved: dict[str, Any] | None = None


def find_start(cfg: dict[str, Any], folder: Path, resume: bool, prepared: Prepared) -> Start:
    """Raises UserError for a checkpoint that is no longer one of these settings and this text, and for a lost one."""
    last, name = last_checkpoint(folder), run_name(folder)
    if resume and last.is_file():
        saved = read_checkpoint(last)
        require_trainable(saved, last)
        own = saved["softattn"]
        require_same_text(own, prepared, name)
        require_same_settings(own["config"], cfg, last)
        require_weights(saved, prepared.tokenizer.vocab_size, last)
        if is_first_process():
            complete_names(folder, own, cfg["training"]["keep_steps"])
        return Start(own["step"], own["seconds"], own.get("unvalidated", False), fork=cfg.get("fork"), saved=saved)
    if resume and (lost := lost_last(folder, cfg["runs"])) is not None:
        raise UserError(lost)
    if cfg.get("fork") is not None:
        parent, fork = read_parent(cfg["fork"], cfg["runs"])
        return Start(parent["softattn"]["step"], parent["softattn"]["seconds"], parent=parent, fork=fork)
    return Start()


def last_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def require_budget(cfg: dict[str, Any], start: Start, steps: int, name: str) -> None:
    """Raises UserError where less than what is done already was asked for, and where a fork is left nothing to do."""
    if start.step > steps:
        raise UserError(
            f"{said_budget(cfg, steps)} is less than what run {name} has done, {start.step} steps; give a larger "
            f"budget, such as steps={2 * start.step}, to go on"
        )
    if start.step == steps and start.parent is not None:
        raise UserError(
            f"fork={start.fork}: {said_budget(cfg, steps)} leaves a fork of step {start.step} nothing to do; give a "
            f"larger budget, such as steps={2 * start.step}"
        )


def begin(folder: Path, start: Start, contents: dict[str, Any], parts: Parts, console: Console) -> None:
    """Check what the weights are followed by, then write how the run stands: with the status "running", without what it
    is going to do again, and with the checkpoint that a fork begins with.

    `contents`: entries of "softattn" in its checkpoints. Raises UserError, and has written nothing then.
    """
    last, first = last_checkpoint(folder), None
    if start.parent is not None:
        first = _first_of_fork(start, contents, parts)
    elif start.saved is not None:
        require_optimizer(start.saved, parts.model, parts.optimizer, str(last))
        parent = start.saved["softattn"].get("parent")
        lost = missing_rows(folder, start.step, parent) if is_first_process() else None
        if lost is not None:
            console.print(lost, soft_wrap=True)
    # Nothing is said or written before everything has been checked that can be.
    if is_first_process():
        remove_left_over(folder)
        if first is not None:
            write_checkpoint(first, last)
        rows_kept = start.step if start.step else -1  # without a checkpoint all is done again, step 0 too
        cut_metrics(folder, rows_kept)
        cut_samples(folder, rows_kept)
        write_config(folder, contents["config"])
        write_status(folder, "running", step=start.step, steps=parts.steps, parent=start.fork)
    elif first is not None:
        _wait_for(last)


def _first_of_fork(start: Start, contents: dict[str, Any], parts: Parts) -> dict[str, Any]:
    assert start.parent is not None and start.fork is not None
    first = planted(start.parent, start.fork, contents, parts.model, parts.optimizer, parts.accumulate)
    require_weights(start.parent, parts.model.vocab_size, Path(f"fork={start.fork}"))
    require_optimizer(first, parts.model, parts.optimizer, f"the checkpoint of fork={start.fork}")
    return first


def _wait_for(checkpoint: Path) -> None:
    deadline = time.monotonic() + WAIT
    while not checkpoint.is_file():
        if time.monotonic() > deadline:
            raise UserError(f"the first process wrote no {checkpoint} within {WAIT:.0f} s")
        time.sleep(0.1)
