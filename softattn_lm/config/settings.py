"""The settings that go to no constructor: one dataclass per section of a command's yaml, and their schema.

`config/check.py` reads the annotations from this file, as it reads those of a constructor. Standard library only.
Built from a checked config:  TrainingSettings(**cfg["training"]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

Settings = TypeVar("Settings")


def section(kind: type[Settings], cfg: Mapping[str, Any]) -> Settings:
    """`kind` filled from the keys of `cfg` that it has; the others (groups and sections) are left out."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in cfg.items() if key in names})


@dataclass(frozen=True)
class TrainSettings:
    """Top level of configs/train.yaml. Exactly one of steps, tokens and epochs is a number."""

    lr: float  # the one learning rate; every group of parameters is a multiple of it
    seed: int = 0
    name: str | None = None
    runs: str = "runs"
    steps: int | None = 1500
    tokens: int | None = None
    epochs: float | None = None
    batch_size: int = 12  # sequences per optimizer step, over all devices and accumulation steps
    resume: str | None = None
    fork: str | None = None  # <run>@<step>: what this run starts from
    trust: str | None = None
    describe: bool = False
    ablation: dict[str, Any] | None = None  # name, arm, seed, stage, size: what this run is in an ablation


@dataclass(frozen=True)
class TrainingSettings:
    """Section `training`: how a step is made, and how often something else happens (in optimizer steps)."""

    accumulate: int = 1
    clip: float | None = 1.0  # largest norm of the whole gradient; null does not clip
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    loss_chunk: int | None = None  # tokens whose logits are made at once; 0: all; null: where the vocabulary is large
    checkpoint_activations: Literal["none", "block"] = "none"
    val_every: int = 250
    log_every: int = 10
    throughput: bool = True  # tokens per second, and their share of the device's peak, at log_every
    sample_every: int | None = 0  # 0: at the end only; null: never
    save_every: int = 0  # 0: with each validation
    keep_steps: list[int] | Literal["log"] = field(default_factory=list)
    num_workers: int = 0
    nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10  # over the whole run, with nonfinite="skip"
    telemetry: bool = True  # what attention does inside, at validations
    score: list[Literal["validation", "test"]] = field(default_factory=list)  # with the final weights, per window


@dataclass(frozen=True)
class TrainerSettings:
    """Section `trainer`: on what the run executes. No result depends on it beyond rounding."""

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int | Literal["auto"] = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    num_nodes: int = 1


@dataclass(frozen=True)
class LoggerSettings:
    """Section `logger`: where metrics go besides metrics.jsonl."""

    name: Literal["csv", "wandb", "none"] = "csv"
    project: str | None = None
    group: str | None = None
    entity: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SampleSettings:
    """configs/sample.yaml."""

    runs: str = "runs"
    checkpoint: str = "last"
    file: str | None = None
    max_new_tokens: int = 500
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: int = 1
    seed: int = 0
    cache: bool = True
    graph: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    trust: str | None = None


@dataclass(frozen=True)
class EvaluateSettings:
    """configs/evaluate.yaml."""

    runs: str = "runs"
    checkpoint: str = "last"
    text: str | None = None
    file: str | None = None
    split: Literal["train", "validation", "test"] = "validation"
    batch_size: int = 32
    by_position: bool = False
    device: str = "auto"
    trust: str | None = None


@dataclass(frozen=True)
class TelemetrySettings:
    """configs/telemetry.yaml."""

    runs: str = "runs"
    figure: str | None = None


@dataclass(frozen=True)
class ProbeScaleSettings:
    """configs/probe_scale.yaml."""

    runs: str = "runs"
    checkpoint: str = "last"
    keys: int = 64
    rows: int = 30_000
    d_k: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256, 512, 1024])
    d_model: int = 128
    seed: int = 0
    trust: str | None = None


@dataclass(frozen=True)
class AblateSettings:
    """configs/ablate.yaml. null where the question, or else a default, decides."""

    name: str | None = None
    runs: str = "runs"
    question: str | None = None
    hypothesis: str | None = None
    baseline: str | None = None
    seeds: int | list[int] | None = None
    metric: Literal["loss", "accuracy"] | None = None
    smallest: float | None = None
    tune: Literal["lr", "none"] | None = None
    trials: int | None = None
    match: Literal["none", "parameters", "flops", "time", "tokens"] | None = None
    ladder: list[str] | None = None
    budget: float | None = None  # minutes
    lines: bool | None = None
    save_as: str | None = None
    dry_run: bool = False
    executor: Literal["local", "print", "slurm", "submitit_local"] = "local"
    slots: int | None = None
    threads: int | None = None
    pin: bool = True
    wait: bool = True
    slurm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportSettings:
    """configs/report.yaml."""

    runs: str = "runs"
    wandb: bool = True


@dataclass(frozen=True)
class CheckAttentionSettings:
    """Top level of configs/check_attention.yaml."""

    model: dict[str, float]
    all: bool = False
    like: Literal["sdpa", "flex", "hf"] | None = None
    callable: str | None = None
    same_as_eager: bool = True
    cost: bool = True


@dataclass(frozen=True)
class PrepareSettings:
    """Top level of configs/prepare_data.yaml."""

    runs: str = "runs"


@dataclass(frozen=True)
class BenchmarkSettings:
    """Top level of configs/benchmark.yaml."""

    runs: str = "runs"
    heads: int = 8
    head_dim: int = 64
    lengths: list[int] = field(default_factory=lambda: [2048, 4096, 8192, 16384])
    window: int = 256
    repeats: int = 5
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    text: str | None = None
    long: bool = False
