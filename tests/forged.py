"""Folders of ablations that nobody trained: losses drawn from a known law, written as run folders.

loss(arm, seed) = level + effect of the arm + pair of the seed + noise of the run,    per window another part on top
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from softattn_lm.ablation import journal
from softattn_lm.ablation.plan import Metric, Plan, Tune
from softattn_lm.ablation.rates import choose
from softattn_lm.runs.files import write_json

WINDOWS, TOKENS, PLACES = 64, 32, 32
LEVEL = 2.0  # nats


def plan_of(effects: Mapping[str, float], seeds: Sequence[int], name: str = "forged", **settings: Any) -> Plan:
    """The first arm is the baseline."""
    arms = {arm: [f"attention={arm}"] for arm in effects}
    given: dict[str, Any] = {"base": ["model=plain", "logger=wandb", "steps=100"], "seeds_at_start": [*seeds]}
    given["lines"] = True
    return Plan(name, arms, next(iter(effects)), seeds=[*seeds], **(given | settings))


def forge(
    folder: Path,
    effects: Mapping[str, float],
    seeds: Sequence[int] = range(5),
    *,
    plan: Plan | None = None,
    pair_sd: float = 0.01,
    run_sd: float = 0.004,
    seed: int = 0,
    size: str | None = None,
    logger: str = "none",
) -> Plan:
    """Writes plan, log and the runs of the report stage. Accuracies, if that is the metric, are 1 − loss."""
    plan = plan or plan_of(effects, seeds, folder.name)
    plan.write(folder)
    if not (folder / journal.FILE).exists():
        journal.append(folder, "planned", seeds=plan.seeds, arms=list(plan.arms), sha256=None)
    generator = np.random.default_rng(seed)
    pair = {s: pair_sd * generator.normal() for s in plan.seeds}
    text = 0.2 * generator.normal(size=WINDOWS)
    text -= text.mean()
    level = 0.0 if plan.metric.name == "accuracy" else LEVEL
    for arm, effect in effects.items():
        for s in plan.seeds:
            loss = level + effect + pair[s] + run_sd * generator.normal()
            own = 0.02 * generator.normal(size=WINDOWS)
            scores = loss + (text + own - own.mean() if level else 0.0) * np.ones(WINDOWS)
            write_run(folder, plan, arm, s, scores, size=size, logger=logger)
    return plan


def write_run(
    folder: Path,
    plan: Plan,
    arm: str,
    seed: int,
    window_losses: np.ndarray,
    *,
    size: str | None = None,
    steps: int = 100,
    lr: float = 0.001,
    logger: str = "none",
    fingerprint: str = "cafe",
    stage: str = "report",
) -> Path:
    """window_losses (W,): nats per token of the test windows; the validation part is 0.01 better."""
    run = folder.joinpath(stage, *([size] if size else []), arm, f"seed-{seed}")
    (run / "scores").mkdir(parents=True)
    place = {"name": plan.name, "arm": arm, "seed": seed, "stage": stage, "size": size, "rate": None}
    config = {
        "seed": seed, "name": f"{plan.name}/{stage}/{arm}/seed-{seed}", "steps": steps, "tokens": None, "epochs": None,
        "batch_size": 8, "lr": lr, "ablation": place, "logger": {"name": logger}, "schedule": {"warmup": 0.05},
        "model": {"context": TOKENS}, "optimizer": {"lr": lr}, "tokenizer": {}, "data": {},
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    task = plan.metric.name == "accuracy"
    figures = {}
    for split, better in (("validation", 0.01), ("test", 0.0)):
        arrays = split_scores(window_losses - better, task)
        np.savez(run / "scores" / f"{split}.npz", **arrays)
        loss = float(arrays["nats"].sum() / arrays["tokens"].sum())
        accuracy = float(arrays["correct"].sum() / arrays["answers"].sum()) if task else None
        figures[split] = {"loss": loss, "loss_se": 0.01, "accuracy": accuracy, "tokens": int(arrays["tokens"].sum())}
    rows = []
    for step in range(10, steps + 1, 10):
        loss = figures["validation"]["loss"] + 1.2 * np.exp(-step / 25)
        row = {"kind": "validation", "name": "validation", "step": step, "loss": loss}
        if task:
            row["accuracy"] = max(0.0, (figures["validation"]["accuracy"] or 0.0) * (1 - np.exp(-step / 12)))
        rows.append(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = {"state": "finished", "steps": steps, "scores": figures, "parameters": 1000, "seconds": 60.0}
    write_json(run / "summary.json", summary | {"tokens": steps * 256, "fingerprint": fingerprint})
    write_json(run / "status.json", {"state": "finished", "step": steps, "steps": steps, "error": None})
    return run


def split_scores(window_losses: np.ndarray, task: bool) -> dict[str, np.ndarray]:
    tokens = np.full(len(window_losses), float(TOKENS))
    by_place = window_losses.mean() + 0.8 / np.sqrt(1 + np.arange(PLACES))
    by_place += window_losses.mean() - by_place.mean()
    count = np.full(PLACES, float(len(window_losses)))
    arrays = {"nats": window_losses * tokens, "tokens": tokens, "position_nats": by_place * count}
    arrays |= {"position_tokens": count}
    if task:
        right = np.clip(np.round(200 * (1 - window_losses)), 0, 200)
        pairs = np.where(np.arange(len(right)) % 2, 8, 4)
        arrays |= {"correct": right, "answers": np.full(len(window_losses), 200.0), "pairs": pairs}
        # Near answers are right, and what is wrong is wrong at the far ones.
        wrong = 200.0 * len(right) - right.sum()
        asked = np.array([50.0, 50.0, 100.0]) * len(right)
        missed = np.diff(np.minimum(wrong, np.cumsum(asked[::-1])), prepend=0.0)[::-1]
        arrays |= {"gap_from": np.array([1, 2, 8]), "gap_correct": asked - missed, "gap_answers": asked}
    return arrays


def diverged(run: Path, step: int = 40) -> None:
    """As `training` leaves a run whose loss is no number any more."""
    for file in (run / "summary.json", *(run / "scores").iterdir()):
        file.unlink()
    error = f"the loss is no longer finite at step {step}; type a smaller lr"
    write_json(run / "status.json", {"state": "failed", "step": step, "steps": 100, "error": error})


def tuned(folder: Path, plan: Plan, best: Mapping[str, float], seed: int = 0) -> None:
    """Logs a choice per arm: a parabola of log2 lr around best[arm]. The highest rate diverged on one seed."""
    generator = np.random.default_rng(seed)
    assert plan.tune is not None
    for arm, optimum in best.items():
        losses: dict[float, dict[int, float]] = {}
        for rate in plan.tune.grid:
            away = np.log2(rate * 0.001 / optimum)
            losses[0.001 * rate] = {s: 2 + 0.01 * away**2 + 0.003 * generator.normal() for s in plan.tune.seeds}
        losses[0.001 * plan.tune.grid[-1]][plan.tune.seeds[0]] = float("inf")
        choice = choose(losses)
        journal.append(
            folder, "chosen_rate", arm=arm, size=None, lr=choice.lr, excess=choice.excess, df=choice.df,
            edge=choice.edge, smooth=choice.smooth, losses=losses,
        )  # fmt: skip


def measured(folder: Path, plan: Plan, parameters: Mapping[str, int]) -> None:
    for arm, count in parameters.items():
        cost = {
            "parameters": count + 6240, "parameters_without_embeddings": count, "steps": 100, "tokens_per_step": 256,
            "flops_per_token": 6 * count, "executed_flops_per_token": 6.4 * count, "decode_bytes_per_token": 1024,
            "decode_state_bytes": 0, "tokens_per_second": 41000.0, "peak_memory_bytes": 35762176, "vocab_size": 65,
            "device": "cpu", "threads": 1,
        }  # fmt: skip
        (folder / "measured").mkdir(exist_ok=True)
        write_json(folder / "measured" / f"{arm}.json", cost)


TUNE = Tune()
RECALL = Metric("accuracy", "test", "higher", 0.99)
