"""A complete training configuration so small that twenty steps take less than a second. Used by the training tests."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.training.run import train

TINY = [
    "trainer=cpu",
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=16",
    "model.context=16",
    "model.dropout=0.2",
    "batch_size=8",
    "steps=6",
    "training.val_every=3",
    "training.log_every=2",
    "training.throughput=false",  # rows of equal runs are equal, but for their seconds
    "training.accumulate=2",
    "logger=none",
    "data=text_file",
    "tokenizer=char",
    "data.sampling=permuted",
    "data.val_fraction=0.1",
]


def text(n: int = 6000, seed: int = 0) -> str:
    """`n` characters of words made of few letters: something that can be learned."""
    generator = np.random.default_rng(seed)
    words = ["".join(generator.choice(list("abcdefgh"), size=generator.integers(2, 6))) for _ in range(30)]
    return (" ".join(generator.choice(words, size=n)))[:n]


def tiny_config(folder: Path, *overrides: str) -> dict[str, Any]:
    """The checked config of `train` with TINY and `overrides`, its text and runs below `folder`."""
    file = folder / "text.txt"
    if not file.exists():
        file.write_text(text(), encoding="utf-8")
    replaced = {override.partition("=")[0] for override in overrides}
    if replaced & {"tokens", "epochs"}:
        replaced.add("steps")
    base = [override for override in TINY if override.partition("=")[0] not in replaced]
    own = [f"runs={folder / 'runs'}"]
    if not any(override.startswith("data=") for override in overrides):
        own.append(f"data.path={file}")
    elif "data=text_file" not in overrides:
        base = [override for override in base if not override.startswith("data.")]
    return check(compose("train", [*own, *base, *overrides], config_folder()), "TrainSettings")


def tiny_train(folder: Path, *overrides: str, resume: Path | None = None) -> Path:
    """Train, quietly, and return the run folder."""
    cfg = tiny_config(folder, *overrides)
    run = resume or new_run(cfg["runs"], cfg["name"], cfg)
    train(cfg, run, resume=resume is not None, console=Console(quiet=True))
    return run


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if row["kind"] == "train"]
