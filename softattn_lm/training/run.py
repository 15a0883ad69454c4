"""A training run from settings to summary: data, model, Lightning, and what is left in the run folder."""

from __future__ import annotations

import errno
import json
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console

from softattn_lm.config.build import build
from softattn_lm.config.settings import LoggerSettings, TrainerSettings, TrainingSettings
from softattn_lm.data import Prepared, Split, prepared_for
from softattn_lm.data.module import TextDataModule, micro_batch_size
from softattn_lm.data.tasks import FixedSet
from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import LikelihoodResult
from softattn_lm.evaluation.telemetry import Probe, make_probe
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.own_files import require_own_files
from softattn_lm.runs import (
    State,
    cut_metrics,
    in_hand,
    is_first_process,
    read_status,
    remove_left_over,
    run_name,
    runs_folder,
    versions,
    write_config,
    write_failed,
    write_json,
    write_status,
)
from softattn_lm.training import slurm
from softattn_lm.training.break_even import BreakEven
from softattn_lm.training.budget import max_steps, said_budget
from softattn_lm.training.checkpoint import load_run, read_checkpoint, write_checkpoint
from softattn_lm.training.checkpoints import Checkpoints, complete_names
from softattn_lm.training.console import RunConsole
from softattn_lm.training.continued import (
    missing_rows,
    require_optimizer,
    require_same_settings,
    require_trainable,
    require_weights,
)
from softattn_lm.training.describe import describe
from softattn_lm.training.fork import lost_last, planted, read_parent
from softattn_lm.training.interrupt import Interrupt
from softattn_lm.training.launch import check_device, device_count, make_trainer, on_cuda, quiet
from softattn_lm.training.lit import LitGPT, ValidationSet
from softattn_lm.training.metrics import Clock, Metrics, write_csv
from softattn_lm.training.progress import ProgressReport
from softattn_lm.training.samples import Samples, append_sample, continued, cut_samples, has_sample
from softattn_lm.training.schedule import unfinished_warmup
from softattn_lm.training.scores import require_scorable, write_scores
from softattn_lm.training.signals import Left, asks_to_requeue, exit_status, signal_name, signals_end_the_run
from softattn_lm.training.summary import ended, say
from softattn_lm.training.telemetry import Telemetry
from softattn_lm.training.throughput import Throughput, peak_flops
from softattn_lm.training.tracking import finish_loggers, make_loggers

# Per forward pass and device. Large enough to be quick, small enough for the logits of a large vocabulary: no result
# depends on it beyond rounding.
VALIDATION_TOKENS = 4096
VALIDATION_LOGITS = 2**26  # of them at most, where the vocabulary is large
# What writing a file may come to: no room, none allowed, no permission, a broken disk.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
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


def described(cfg: dict[str, Any]) -> dict[str, Any]:
    """The sizes of what `cfg` would train; only the tokenizer needs the data."""
    prepared = prepared_data(cfg)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=cfg["seed"])
    return describe(model, cfg["batch_size"], steps)


def prepared_data(cfg: dict[str, Any]) -> Prepared:
    return prepared_for(cfg, runs_folder(cfg["runs"]) / "cache")


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
            summary = _train(cfg, folder, resume, console, progress, first_rank)
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


def _require_same_text(own: dict[str, Any], prepared: Prepared, name: str) -> None:
    """`own`: "softattn" of the run's checkpoint."""
    if own["data"]["fingerprint"] != prepared.fingerprint:
        raise UserError(
            f"the text of run {name} has changed since it was saved, so it cannot be continued; start a new run"
        )
    before, now = own.get("validation_sets", {}), validation_fingerprints(prepared)
    other = sorted(key for key in before if before[key] != now.get(key))
    if other:
        raise UserError(
            f"the validation set {other[0]} of run {name} has changed since it was saved, and its losses would no "
            "longer be of one text; put the old text back, or start a new run"
        )


def validation_fingerprints(prepared: Prepared) -> dict[str, str]:
    """Of the validation sets beside the text, which have token files of their own."""
    paths = {name: split.path.parent for name, split in prepared.splits.items() if isinstance(split, Split)}
    return {name: place.name for name, place in paths.items() if place != prepared.folder}


def _start(cfg: dict[str, Any], folder: Path, resume: bool, prepared: Prepared) -> Start:
    last, name = folder / "checkpoints" / "last.ckpt", run_name(folder)
    if resume and last.is_file():
        saved = read_checkpoint(last)
        require_trainable(saved, last)
        own = saved["softattn"]
        _require_same_text(own, prepared, name)
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


def _train(
    cfg: dict[str, Any], folder: Path, resume: bool, console: Console, progress: dict[str, int], first_rank: bool
) -> dict[str, Any]:
    training, seed = TrainingSettings(**cfg["training"]), cfg["seed"]
    check_device(TrainerSettings(**cfg["trainer"]))
    prepared = prepared_data(cfg)
    require_scorable(training.score, prepared)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    last, name = folder / "checkpoints" / "last.ckpt", run_name(folder)
    start = _start(cfg, folder, resume, prepared)
    first_step, seconds = start.step, start.seconds
    if start.fork is not None:
        cfg = cfg | {"fork": start.fork}
    progress |= {"step": first_step, "steps": steps}
    if first_step > steps:
        raise UserError(
            f"{said_budget(cfg, steps)} is less than what run {name} has done, {first_step} steps; give a larger "
            f"budget, such as steps={2 * first_step}, to go on"
        )
    if first_step == steps and start.parent is not None:
        raise UserError(
            f"fork={start.fork}: {said_budget(cfg, steps)} leaves a fork of step {first_step} nothing to do; give a "
            f"larger budget, such as steps={2 * first_step}"
        )
    if first_step == steps and not start.unvalidated:
        console.print(
            f"run {name} is already at step {first_step} of {steps}; give a larger budget, such as "
            f"steps={2 * first_step}, to go on",
            soft_wrap=True,
        )
        if first_rank and not _summarised(folder, steps):
            _finish(cfg, folder, prepared, start)
        return {"state": "finished", "step": first_step, "steps": steps, "folder": str(folder), "nothing_to_do": True}
    if resume and first_step == 0 and first_rank:
        console.print(f"run {name} has saved no checkpoint yet, so it begins again at step 0", soft_wrap=True)

    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=seed)
    sizes = describe(model, cfg["batch_size"], steps)
    val_batch_size = _windows_at_once(model)
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
    optimizer, schedule = build(cfg["optimizer"]), build(cfg["schedule"])
    fresh = optimizer(model.parameter_roles())  # Lightning makes the one that is used; this one is for its refusals
    lit = LitGPT(
        model,
        optimizer=optimizer,
        schedule=schedule,
        steps=steps,
        accumulate=training.accumulate,
        seed=seed,
        compiled=training.compile,
        loss_chunk=training.loss_chunk,
        checkpoint_activations=training.checkpoint_activations,
        nonfinite=training.nonfinite,
        max_skipped=training.max_skipped,
        validation_sets=[_validation_set(prepared, each) for each in data.validation_names],
        val_batch_size=val_batch_size,
    )
    contents = {
        "config": cfg,
        "tokenizer": prepared.tokenizer.state(),
        "versions": versions(),
        "data": {"fingerprint": prepared.fingerprint, "source": prepared.source},
        "validation_sets": validation_fingerprints(prepared),
    }
    first = None
    if start.parent is not None:
        assert start.fork is not None
        first = planted(start.parent, start.fork, contents, model, fresh, training.accumulate)
        require_weights(start.parent, prepared.tokenizer.vocab_size, Path(f"fork={start.fork}"))
        require_optimizer(first, model, fresh, f"the checkpoint of fork={start.fork}")
    elif start.saved is not None:
        require_optimizer(start.saved, model, fresh, str(last))
        lost = missing_rows(folder, first_step, start.saved["softattn"].get("parent")) if first_rank else None
        if lost is not None:
            console.print(lost, soft_wrap=True)
        start = replace(start, saved=None)  # it is as large as the model and its optimizer
    # Nothing is said or written before everything has been checked that can be.
    if first_rank:
        remove_left_over(folder)
        if first is not None:
            write_checkpoint(first, last)
        rows_kept = first_step if first_step else -1  # without a checkpoint all is done again, step 0 too
        cut_metrics(folder, rows_kept)
        cut_samples(folder, rows_kept)
        write_config(folder, cfg)
        write_status(folder, "running", step=first_step, steps=steps, parent=start.fork)
    elif first is not None:
        _wait_for(last)
    progress["running"] = 1
    clock = Clock(seconds)
    probe = None
    if training.telemetry and data.validation_names:
        held_back = prepared.splits[data.validation_names[0]]
        documents = held_back.documents if model.packs_documents else None
        probe = make_probe(held_back.tokens, model.context, model.vocab_size, documents)
    throughput = None
    if training.throughput:
        devices = device_count(TrainerSettings(**cfg["trainer"]))
        peak = peak_flops(torch.device("cuda" if on_cuda(TrainerSettings(**cfg["trainer"])) else "cpu"))
        throughput = Throughput(sizes["tokens_per_step"], sizes["flops_per_token"], peak, devices)
    callbacks = _callbacks(
        training, folder, console, clock, prepared, contents, sizes, seed, bool(lit.validation_sets), probe, throughput
    )
    interrupt = next(c for c in callbacks if isinstance(c, Interrupt))
    with quiet():
        loggers = make_loggers(LoggerSettings(**cfg["logger"]), folder, cfg)
        trainer = make_trainer(
            TrainerSettings(**cfg["trainer"]),
            # A run whose last validation alone is left to do: Lightning would find it finished.
            replace(training, val_every=steps) if first_step == steps else training,
            folder,
            steps=steps + (first_step == steps),
            validates=bool(lit.validation_sets),
            callbacks=callbacks,
            loggers=loggers,
            unused_parameters=not all(block.attention.kernel.reads_scores for block in model.layers),
        )
        micro_batch_size(cfg["batch_size"], trainer.num_devices * trainer.num_nodes, training.accumulate)
        kernels = model.explain_kernels(trainer.strategy.root_device.type)
        warning = unfinished_warmup(schedule, steps)
        if first_rank:
            if warning is not None:
                console.print(warning, soft_wrap=True)
            for line in kernels:
                console.print(f"attention auto takes {line}", soft_wrap=True)
            stored = prepared.splits["train"].n_tokens
            console.print(
                f"run {folder}: {sizes['parameters']:,} parameters, {f'{stored:,}' if stored else 'fresh'} training "
                f"tokens of {prepared.source}, steps {first_step} to {steps} of {sizes['tokens_per_step']:,} tokens",
                soft_wrap=True,
            )
        try:
            trainer.fit(lit, datamodule=data, ckpt_path=last if first_step else None, weights_only=True)
        finally:
            progress["step"] = trainer.global_step
            finish_loggers(loggers)
    if interrupt.interrupted is not None:
        state = {
            "state": "interrupted",
            "step": trainer.global_step,
            "steps": steps,
            "run": name,
            "folder": str(folder),
            "signal": interrupt.interrupted,
            "exit_status": exit_status(interrupt.interrupted),
        }
        if first_rank:
            said, step = ended(state), trainer.global_step
            write_status(folder, "interrupted", step=step, steps=steps, error=said, parent=start.fork)
            # The job of a sweep is the sweep's to run again, not SLURM's.
            alone = "/" not in (cfg["name"] or "")
            if asks_to_requeue(interrupt.interrupted) and slurm.job_id() is not None and alone:
                said = f"{said}; {slurm.requeue()}"
            console.print(said, soft_wrap=True)
        return state
    assert trainer.global_step == steps, (trainer.global_step, steps)
    spent = clock.seconds
    per_second = (steps - first_step) * sizes["tokens_per_step"] / max(1e-9, spent - seconds)
    scores = {}
    if first_rank and training.score:
        whole = load_run(folder).model if isinstance(trainer.strategy, ModelParallelStrategy) else model
        scores = write_scores(whole, prepared, training.score, folder, val_batch_size)
    summary = {
        "state": "finished",
        "folder": str(folder),
        "step": steps,
        "steps": steps,
        "parent": start.fork,
        "validation": {name: _figures(result) for name, result in lit.validation.items()},
        "tokens": steps * sizes["tokens_per_step"],
        "seconds": spent,
        "tokens_per_second": per_second,
        "mfu": None if throughput is None else throughput.of(per_second).get("mfu"),
        "parameters": sizes["parameters"],
        "opening": prepared.tokenizer.decode(_opening(prepared)),
        "flops_per_token": sizes["flops_per_token"],
        "attention": kernels,
        "telemetry": next((c.cost() for c in callbacks if isinstance(c, Telemetry)), None),
        "scores": scores,
        "fingerprint": prepared.fingerprint,
    }
    if first_rank:
        # The folder may be moved, so it does not know where it is.
        write_json(folder / "summary.json", {key: value for key, value in summary.items() if key != "folder"})
        write_status(folder, "finished", step=steps, steps=steps, parent=start.fork)
        say(console, summary)
    return summary


def _summarised(folder: Path, steps: int) -> bool:
    """A damaged summary is none, and is written anew."""
    file = folder / "summary.json"
    try:
        summary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (ValueError, RecursionError):
        return False
    return isinstance(summary, dict) and summary.get("step") == steps and read_status(folder).get("state") == "finished"


def _finish(cfg: dict[str, Any], folder: Path, prepared: Prepared, start: Start) -> None:
    """What a process killed behind its last checkpoint did not come to: the last sample, scores, summary and status.

    What the probes cost is not known any more; tokens per second are those of the whole run.
    """
    loaded = load_run(folder)
    sizes = describe(loaded.model, cfg["batch_size"], start.step)
    training, opening = TrainingSettings(**cfg["training"]), _opening(prepared)
    score, tokens = training.score, start.step * sizes["tokens_per_step"]
    if training.sample_every is not None and not has_sample(folder, start.step):
        _, text = continued(loaded.model, prepared.tokenizer, opening, cfg["seed"])
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
        "opening": prepared.tokenizer.decode(opening),
        "flops_per_token": sizes["flops_per_token"],
        "attention": loaded.model.explain_kernels("cuda" if on_cuda(TrainerSettings(**cfg["trainer"])) else "cpu"),
        "telemetry": None,
        "scores": write_scores(loaded.model, prepared, score, folder, _windows_at_once(loaded.model)),
        "fingerprint": prepared.fingerprint,
    }
    write_json(folder / "summary.json", summary)
    write_status(folder, "finished", step=start.step, steps=start.step, parent=start.fork)


def _windows_at_once(model: DecoderLM) -> int:
    """Of a validation batch."""
    return max(1, min(VALIDATION_TOKENS, VALIDATION_LOGITS // model.vocab_size) // model.context)


def _wait_for(checkpoint: Path) -> None:
    deadline = time.monotonic() + WAIT
    while not checkpoint.is_file():
        if time.monotonic() > deadline:
            raise UserError(f"the first process wrote no {checkpoint} within {WAIT:.0f} s")
        time.sleep(0.1)


def _callbacks(
    training: TrainingSettings,
    folder: Path,
    console: Console,
    clock: Clock,
    prepared: Prepared,
    contents: dict[str, Any],
    sizes: dict[str, Any],
    seed: int,
    validates: bool,
    probe: Probe | None,
    throughput: Throughput | None,
) -> list[Callback]:
    """In the order in which Lightning calls them: rows are written before they are shown, and both before a
    checkpoint.
    """
    metrics = Metrics(
        folder,
        clock,
        log_every=training.log_every,
        tokens_per_step=sizes["tokens_per_step"],
        throughput=throughput,
    )
    cache = runs_folder(contents["config"]["runs"]) / "cache"
    every, tokenizer, opening = training.sample_every, prepared.tokenizer, _opening(prepared)
    checkpoints = Checkpoints(
        folder,
        metrics,
        clock,
        contents,
        accumulate=training.accumulate,
        val_every=training.val_every,
        save_every=training.save_every,
        keep_steps=training.keep_steps,
        validates=validates,
    )
    interrupt = Interrupt(checkpoints, lambda: isinstance(console, RunConsole) and console.nobody_reads)
    samples = []
    if every is not None:
        samples.append(
            Samples(
                folder,
                console,
                clock,
                tokenizer,
                opening,
                every=every,
                seed=seed,
                unfinished=lambda: checkpoints.unvalidated,
            )
        )
    return [
        metrics,
        ProgressReport(console, metrics, clock, tokens_per_step=sizes["tokens_per_step"]),
        *([] if probe is None else [Telemetry(metrics, clock, probe, compiled=training.compile)]),
        *([BreakEven(console, clock, cache, sizes["tokens_per_step"])] if training.compile else []),
        *samples,
        checkpoints,
        interrupt,
    ]


def _opening(prepared: Prepared) -> list[int]:
    """The first tokens that were held back from training, or of the training text if none were."""
    held_back = prepared.splits["validation"]
    return (held_back if held_back.n_tokens else prepared.splits["train"]).tokens[:64].tolist()


def _validation_set(prepared: Prepared, name: str) -> ValidationSet:
    split = prepared.splits[name]
    bytes_per_token = split.n_bytes / split.n_tokens if split.n_bytes else None
    return ValidationSet(name, bytes_per_token, isinstance(split, FixedSet))


def _figures(result: LikelihoodResult) -> dict[str, Any]:
    found = asdict(result)
    return {
        "loss": found["nats_per_token"],
        "loss_se": found["standard_error"],
        "perplexity": result.perplexity,
        "bits_per_byte": found["bits_per_byte"],
        **({} if found["accuracy"] is None else {"accuracy": found["accuracy"]}),
        "tokens": found["tokens"],
    }
