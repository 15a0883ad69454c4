"""A training run from settings to summary: data, model, Lightning, and what is left in the run folder."""

from __future__ import annotations

import errno
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from softattn_lm.config.settings import TrainerSettings, TrainingSettings
from softattn_lm.data import Prepared
from softattn_lm.own_files import require_own_files
from softattn_lm.runs.files import write_failed
from softattn_lm.runs.lock import in_hand
from softattn_lm.runs.names import run_name, runs_folder
from softattn_lm.runs.processes import is_first_process
from softattn_lm.runs.status import State, read_status, write_status
from softattn_lm.runs.versions import versions
from softattn_lm.training import slurm
from softattn_lm.training.break_even import keep_compiled
from softattn_lm.training.budget import max_steps
from softattn_lm.training.console import RunConsole
from softattn_lm.training.finish import finish, finish_killed, summarised
from softattn_lm.training.fit import fit
from softattn_lm.training.launch import check_device
from softattn_lm.training.metrics import write_csv
from softattn_lm.training.parts import build_parts
from softattn_lm.training.prepared import prepared_data, validation_fingerprints
from softattn_lm.training.scores import require_scorable
from softattn_lm.training.signals import Left, asks_to_requeue, exit_status, signal_name, signals_end_the_run
from softattn_lm.training.start import Start, begin, find_start, require_budget
from softattn_lm.training.summary import ended, say

# What writing a file may come to: no room, none allowed, no permission, a broken disk.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def train(cfg: dict[str, Any], folder: Path, resume: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train in `folder`, from its last checkpoint on if `resume`. Returns the summary, with "state" finished or
    interrupted.

    A continued run is, bit for bit, the run that was never interrupted. Raises UserError for settings that do not fit.
    """
    console = RunConsole() if console is None else console
    first_rank = is_first_process()
    progress = {"step": 0, "steps": 0, "running": 0}
    if first_rank:
        require_own_files(folder)
    try:
        with signals_end_the_run(), in_hand(folder) if first_rank else nullcontext():
            summary = _train(cfg, folder, resume, console, progress)
        if first_rank and cfg["logger"]["name"] == "csv":
            write_csv(folder)
        return summary
    except BaseException as error:
        if first_rank:
            with suppress(OSError):  # the disk may be full, which the error says
                _say_how_it_ended(cfg, folder, progress, error)
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            raise write_failed(error, folder) from None
        if isinstance(error, SystemExit) and error.code == 1:
            raise KeyboardInterrupt from None  # which Lightning takes for an end like any other
        raise


def _say_how_it_ended(cfg: dict[str, Any], folder: Path, progress: dict[str, int], error: BaseException) -> None:
    # What kept a run from being continued says nothing about the run: its status stays.
    if progress["running"] or not read_status(folder):
        # Lightning turns a second Ctrl-C into SystemExit.
        state: State = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        step, steps = progress["step"], progress["steps"]
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if state == "interrupted":
            by = signal_name(error.number) if isinstance(error, Left) else "Ctrl-C"
            said = f"interrupted by {by} " + (f"at step {step} of {steps}" if steps else "before the first step")
        write_status(folder, state, step=step, steps=steps, error=said, parent=cfg.get("fork"))
    if cfg["logger"]["name"] == "csv":
        write_csv(folder)


def _train(
    cfg: dict[str, Any], folder: Path, resume: bool, console: Console, progress: dict[str, int]
) -> dict[str, Any]:
    training = TrainingSettings(**cfg["training"])
    check_device(TrainerSettings(**cfg["trainer"]))
    prepared = prepared_data(cfg)
    require_scorable(training.score, prepared)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    start = find_start(cfg, folder, resume, prepared)
    if start.fork is not None:
        cfg = cfg | {"fork": start.fork}
    progress |= {"step": start.step, "steps": steps}
    require_budget(cfg, start, steps, run_name(folder))
    if start.step == steps and not start.unvalidated:
        return _nothing_to_do(cfg, folder, prepared, start, console)
    if resume and start.step == 0 and is_first_process():
        console.print(
            f"run {run_name(folder)} has saved no checkpoint yet, so it begins again at step 0", soft_wrap=True
        )
    if training.compile:
        keep_compiled(runs_folder(cfg["runs"]) / "cache")
    parts = build_parts(cfg, prepared, steps, start.step)
    contents = {
        "config": cfg,
        "tokenizer": prepared.tokenizer.state(),
        "versions": versions(),
        "data": {"fingerprint": prepared.fingerprint, "source": prepared.source},
        "validation_sets": validation_fingerprints(prepared),
    }
    begin(folder, start, contents, parts, console)
    start = replace(start, saved=None, parent=None)  # each is as large as the model and its optimizer
    progress["running"] = 1
    fitted = fit(folder, start, contents, parts, console, progress)
    if fitted.interrupted is not None:
        return _interrupted(cfg, folder, start, steps, fitted.trainer.global_step, fitted.interrupted, console)
    summary = finish(folder, start, training.score, parts, fitted)
    if is_first_process():
        say(console, summary)
    return summary


def _nothing_to_do(
    cfg: dict[str, Any], folder: Path, prepared: Prepared, start: Start, console: Console
) -> dict[str, Any]:
    step = start.step
    console.print(
        f"run {run_name(folder)} is already at step {step} of {step}; give a larger budget, such as "
        f"steps={2 * step}, to go on",
        soft_wrap=True,
    )
    if is_first_process() and not summarised(folder, step):
        finish_killed(cfg, folder, prepared, start)
    return {"state": "finished", "step": step, "steps": step, "folder": str(folder), "nothing_to_do": True}


def _interrupted(
    cfg: dict[str, Any], folder: Path, start: Start, steps: int, step: int, signal: int, console: Console
) -> dict[str, Any]:
    state = {
        "state": "interrupted",
        "step": step,
        "steps": steps,
        "run": run_name(folder),
        "folder": str(folder),
        "signal": signal,
        "exit_status": exit_status(signal),
    }
    if is_first_process():
        said = ended(state)
        write_status(folder, "interrupted", step=step, steps=steps, error=said, parent=start.fork)
        # The job of a sweep is the sweep's to run again, not SLURM's.
        alone = "/" not in (cfg["name"] or "")
        if asks_to_requeue(signal) and slurm.job_id() is not None and alone:
            said = f"{said}; {slurm.requeue()}"
        console.print(said, soft_wrap=True)
    return state
