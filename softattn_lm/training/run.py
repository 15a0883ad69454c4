"""A training run from settings to summary: data, model, Lightning, and what is left in the run folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console

from softattn_lm.config.build import build
from softattn_lm.config.settings import LoggerSettings, TrainerSettings, TrainingSettings
from softattn_lm.data import Prepared, prepare
from softattn_lm.data.module import TextDataModule, micro_batch_size
from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import LikelihoodResult
from softattn_lm.runs import (
    State,
    cut_metrics,
    is_first_process,
    read_status,
    run_name,
    runs_folder,
    versions,
    write_config,
    write_json,
    write_status,
)
from softattn_lm.training.budget import max_steps, said_budget
from softattn_lm.training.checkpoint import read_checkpoint
from softattn_lm.training.checkpoints import Checkpoints
from softattn_lm.training.console import plain_console
from softattn_lm.training.describe import describe
from softattn_lm.training.interrupt import Interrupt, handlers_restored
from softattn_lm.training.launch import check_device, make_trainer, quiet
from softattn_lm.training.lit import LitGPT, ValidationSet
from softattn_lm.training.metrics import Clock, Metrics, write_csv
from softattn_lm.training.progress import ProgressReport
from softattn_lm.training.samples import Samples, cut_samples
from softattn_lm.training.schedule import unfinished_warmup
from softattn_lm.training.summary import ended, say
from softattn_lm.training.tracking import finish_loggers, make_loggers

# Per forward pass and device. Large enough to be quick, small enough for the logits of a large vocabulary: no result
# depends on it beyond rounding.
VALIDATION_TOKENS = 4096


def described(cfg: dict[str, Any]) -> dict[str, Any]:
    """The sizes of what `cfg` would train; only the tokenizer needs the data."""
    prepared = prepared_data(cfg)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=cfg["seed"])
    return describe(model, cfg["batch_size"], steps)


def prepared_data(cfg: dict[str, Any]) -> Prepared:
    return prepare(build(cfg["data"]), cfg["tokenizer"], runs_folder(cfg["runs"]) / "cache")


def train(cfg: dict[str, Any], folder: Path, resume: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train in `folder`, from its last checkpoint on if `resume`. Returns the summary, with "state" finished or
    interrupted.

    A continued run is, bit for bit, the run that was never interrupted. Raises UserError for settings that do not fit.
    """
    console = plain_console() if console is None else console
    first_rank = is_first_process()
    progress = {"step": 0, "steps": 0, "running": 0}
    try:
        return _train(cfg, folder, resume, console, progress, first_rank)
    except BaseException as error:
        # What kept a run from being continued says nothing about the run: its status stays.
        if first_rank and (progress["running"] or not read_status(folder)):
            # Lightning turns a second Ctrl-C into SystemExit.
            state: State = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            said = " ".join(f"{type(error).__name__}: {error}".split())
            write_status(folder, state, step=progress["step"], steps=progress["steps"], error=said)
        raise
    finally:
        if first_rank and cfg["logger"]["name"] == "csv":
            write_csv(folder)


def _train(
    cfg: dict[str, Any], folder: Path, resume: bool, console: Console, progress: dict[str, int], first_rank: bool
) -> dict[str, Any]:
    training, seed = TrainingSettings(**cfg["training"]), cfg["seed"]
    check_device(TrainerSettings(**cfg["trainer"]))
    prepared = prepared_data(cfg)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    last, name = folder / "checkpoints" / "last.ckpt", run_name(folder)
    first_step, seconds = 0, 0.0
    if resume and last.is_file():
        saved = read_checkpoint(last)["softattn"]
        first_step, seconds = saved["step"], saved["seconds"]
        if saved["data"]["fingerprint"] != prepared.fingerprint:
            raise UserError(
                f"the text of run {name} has changed since it was saved, so it cannot be continued; start a new run"
            )
    progress |= {"step": first_step, "steps": steps}
    if first_step > steps:
        raise UserError(
            f"{said_budget(cfg, steps)} is less than what run {name} has done, {first_step} steps; give a larger "
            f"budget, such as steps={2 * first_step}, to go on"
        )
    if first_step == steps:
        console.print(
            f"run {name} is already at step {first_step} of {steps}; give a larger budget, such as "
            f"steps={2 * first_step}, to go on",
            soft_wrap=True,
        )
        return {"state": "finished", "step": first_step, "steps": steps, "folder": str(folder), "nothing_to_do": True}
    if resume and not last.is_file() and first_rank:
        console.print(f"run {name} has saved no checkpoint yet, so it begins again at step 0", soft_wrap=True)

    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=seed)
    sizes = describe(model, cfg["batch_size"], steps)
    val_batch_size = max(1, VALIDATION_TOKENS // model.context)
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
    optimizer(model.parameter_roles())  # Lightning makes the one that is used; this one is for its refusals
    lit = LitGPT(
        model,
        optimizer=optimizer,
        schedule=schedule,
        steps=steps,
        accumulate=training.accumulate,
        seed=seed,
        compiled=training.compile,
        nonfinite=training.nonfinite,
        validation_sets=[ValidationSet(each, _bytes_per_token(prepared, each)) for each in data.validation_names],
        val_batch_size=val_batch_size,
    )
    # Nothing is said or written before everything has been checked that can be.
    if first_rank:
        cut_metrics(folder, first_step)
        cut_samples(folder, first_step)
        write_config(folder, cfg)
        write_status(folder, "running", step=first_step, steps=steps)
    progress["running"] = 1
    clock = Clock(seconds)
    contents = {
        "config": cfg,
        "tokenizer": prepared.tokenizer.state(),
        "versions": versions(),
        "data": {"fingerprint": prepared.fingerprint, "source": prepared.source},
    }
    callbacks = _callbacks(training, folder, console, clock, prepared, contents, sizes, seed, bool(lit.validation_sets))
    interrupt = next(c for c in callbacks if isinstance(c, Interrupt))
    with quiet(), handlers_restored():
        loggers = make_loggers(LoggerSettings(**cfg["logger"]), folder, cfg)
        trainer = make_trainer(
            TrainerSettings(**cfg["trainer"]),
            training,
            folder,
            steps=steps,
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
            console.print(
                f"run {folder}: {sizes['parameters']:,} parameters, {prepared.splits['train'].n_tokens:,} training "
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
        }
        if first_rank:
            write_status(folder, "interrupted", step=trainer.global_step, steps=steps, error=ended(state))
            console.print(ended(state), soft_wrap=True)
        return state
    assert trainer.global_step == steps, (trainer.global_step, steps)
    spent = clock.seconds
    summary = {
        "state": "finished",
        "folder": str(folder),
        "step": steps,
        "steps": steps,
        "validation": {name: _figures(result) for name, result in lit.validation.items()},
        "tokens": steps * sizes["tokens_per_step"],
        "seconds": spent,
        "tokens_per_second": (steps - first_step) * sizes["tokens_per_step"] / max(1e-9, spent - seconds),
        "parameters": sizes["parameters"],
        "opening": prepared.tokenizer.decode(_opening(prepared)),
        "flops_per_token": sizes["flops_per_token"],
        "attention": kernels,
    }
    if first_rank:
        write_json(folder / "summary.json", summary)
        write_status(folder, "finished", step=steps, steps=steps)
        say(console, summary)
    return summary


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
) -> list[Callback]:
    """In the order in which Lightning calls them: rows are written before they are shown, and both before a
    checkpoint.
    """
    metrics = Metrics(
        folder,
        clock,
        log_every=training.log_every,
        tokens_per_step=sizes["tokens_per_step"],
        nonfinite=training.nonfinite,
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
        validates=validates,
    )
    return [
        metrics,
        ProgressReport(console, metrics, clock, tokens_per_step=sizes["tokens_per_step"]),
        checkpoints,
        Interrupt(checkpoints),
        Samples(folder, console, clock, prepared.tokenizer, _opening(prepared), every=training.sample_every, seed=seed),
    ]


def _opening(prepared: Prepared) -> list[int]:
    """The first tokens that were held back from training, or of the training text if none were."""
    held_back = prepared.splits["validation"]
    return (held_back if held_back.n_tokens else prepared.splits["train"]).tokens[:64].tolist()


def _bytes_per_token(prepared: Prepared, name: str) -> float | None:
    split = prepared.splits[name]
    return split.n_bytes / split.n_tokens if split.n_bytes else None


def _figures(result: LikelihoodResult) -> dict[str, Any]:
    found = asdict(result)
    return {
        "loss": found["nats_per_token"],
        "loss_se": found["standard_error"],
        "perplexity": result.perplexity,
        "bits_per_byte": found["bits_per_byte"],
        "tokens": found["tokens"],
    }
