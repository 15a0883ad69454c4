"""`benchmark time_to_loss`: seconds of training that experiment=sprint needs to reach the loss at which
experiment=nanogpt_cpu ends, on Tiny Shakespeare.

    nanogpt_cpu, as published    2000 steps at lr 1e-3, in float32
    nanogpt_cpu, its best        the same at the best of RATES, found on one seed more
    ... in bfloat16              its best again, where the processor has it
    sprint                       a number of steps that is declared below, before anything is run: a linear schedule
                                 ends where the run does, so a loss on the way would not be the one it can reach

sprint is a smaller model of the same context, and runs in bfloat16 where the processor has it. Loss is the mean over
the whole validation split. A ratio counts as reached only if the mean loss of ours over the seeds is not above that of
the other; seconds are those of training, without validation, and every round runs all of them.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from softattn_lm.commands.benchmark_train import configured
from softattn_lm.commands.comparison import Report, Row
from softattn_lm.config.raw import encode
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.runs.new import new_run
from softattn_lm.training.muon import fast_bfloat16
from softattn_lm.training.run import train

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)  # of nanogpt_cpu; 1e-3 is the published one
PEER_STEPS = 2000
# Steps of ours against each, and how many times as fast that should be. Declared from the first 1.1 MB of the novels,
# where ours reached 1.617 in 180 steps and 1.483 in 430 (seeds 0 and 1), and nanogpt_cpu 1.633 and, at its best lr,
# 1.493.
HALF = "its best, bfloat16"
AGAINST = {"published": (180, 6.0), "its best": (430, 4.0), HALF: (430, 4.0)}
QUIET = ["trainer=cpu", "logger=none", "training.telemetry=false", "training.sample_every=null"]


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints two tables and writes every figure to `file`."""
    report = Report(vars(settings), file)
    report.open()
    half = fast_bfloat16(torch.device("cpu"))
    if not half:
        report.console.print("This processor has no fast products in bfloat16: everything runs in float32.")
    with tempfile.TemporaryDirectory() as scratch:
        text = text_words(settings.text, Path(scratch))
        tuning = max(settings.seeds) + 1
        tuned = {}
        for rate in RATES:
            tuned[rate] = one_run([*peer_words(rate), *text], tuning)
            report.console.print(f"seed {tuning}, nanogpt_cpu at lr {rate:g}: {tuned[rate]}", highlight=False)
        best = min(tuned, key=lambda rate: tuned[rate]["loss"])
        sides = {
            "published": peer_words(1e-3),
            "its best": peer_words(best),
            **({HALF: [*peer_words(best), "training.precision=bfloat16"]} if half else {}),
            **{name_of(steps): sprint_words(steps, half) for steps, _ in AGAINST.values()},
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for seed in settings.seeds:
            for name, words in sides.items():
                found[name].append(one_run([*words, *text], seed))
                report.console.print(f"seed {seed}, {name}: {found[name][-1]}", highlight=False)
    report.found |= {"rates": {str(rate): run for rate, run in tuned.items()}, "best": best, "runs": found}
    report.close([comparison(name, found) for name in AGAINST if name in found], losses(found, best))


def text_words(text: str | None, scratch: Path) -> list[str]:
    """What to type for the data: of a file, with nanoGPT's 90/10 split."""
    data, runs = ["data=tiny_shakespeare"], encode(str(scratch))
    if text is not None:
        data = ["data=text_file", f"data.path={encode(str(Path(text).resolve()))}"]
    return [*data, "data.sampling=random", "data.split=contiguous", "data.val_fraction=0.1", f"runs={runs}"]


def peer_words(rate: float) -> list[str]:
    return [
        "experiment=nanogpt_cpu", f"lr={rate}", f"steps={PEER_STEPS}", f"training.val_every={PEER_STEPS}", *QUIET
    ]  # fmt: skip


def sprint_words(steps: int, half: bool) -> list[str]:
    precision = "bfloat16" if half else "float32"
    return [
        "experiment=sprint", f"steps={steps}", f"training.val_every={steps}", f"training.precision={precision}", *QUIET
    ]  # fmt: skip


def name_of(steps: int) -> str:
    return f"sprint, {steps} steps"


def one_run(words: list[str], seed: int) -> dict[str, float]:
    """Loss in nats over the whole validation split, and seconds of training."""
    cfg: dict[str, Any] = configured([*words, f"seed={seed}"])
    summary = train(cfg, new_run(cfg["runs"], None, cfg), console=Console(quiet=True))
    return {"loss": summary["validation"]["validation"]["loss"], "seconds": summary["seconds"]}


def comparison(name: str, found: dict[str, list[dict[str, float]]]) -> Row:
    """Seconds of ours and of the other, seed by seed; the target is missed if the loss was not reached."""
    steps, target = AGAINST[name]
    ours, other = found[name_of(steps)], found[name]
    reached = mean(ours, "loss") <= mean(other, "loss")
    what = f"to the loss of nanogpt_cpu, {name}, in {steps} steps" + ("" if reached else ": NOT REACHED")
    seconds, others = ([run["seconds"] for run in runs] for runs in (ours, other))
    return Row(what, "s", seconds, {name: others}, name, 1 / target, more_is_better=False, missed=not reached)


def mean(runs: list[dict[str, float]], figure: str) -> float:
    return statistics.fmean(run[figure] for run in runs)


def losses(found: dict[str, list[dict[str, float]]], best: float) -> Table:
    table = Table("", "loss of each seed, nats", "mean", title=f"whole validation split; its best lr is {best:g}")
    for name, runs in found.items():
        each = "  ".join(f"{run['loss']:.4f}" for run in runs)
        table.add_row(name, each, f"{mean(runs, 'loss'):.4f}")
    return table
