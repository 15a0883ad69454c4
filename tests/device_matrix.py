"""The same global batch of 8 on 1 and 2 processes, in 1 to 4 accumulation steps: what it changes. Prints a table.

    python tests/device_matrix.py

Processes talk over gloo on this machine's processor. One process with the whole batch is what the others are compared
with, after 20 steps without dropout.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from softattn_lm.runs.metrics import read_metrics
from tests import ranks
from tests.tiny_run import text

OPTIMIZERS = ("adamw", "muon")
BATCH, STEPS = 8, 20
SAME = (
    "model.n_layer=1",
    "model.n_head=2",
    "model.d_model=16",
    "model.context=8",
    "model.dropout=0",
    f"batch_size={BATCH}",
    f"steps={STEPS}",
    "training.val_every=10",
    "training.log_every=5",
    "data=text_file",
    "data.val_fraction=0.3",
    "tokenizer=char",
)


@dataclass(frozen=True)
class Layout:
    """`devices` × `accumulate` × `micro` = the global batch."""

    strategy: str
    devices: int
    accumulate: int

    @property
    def micro(self) -> int:
        return BATCH // (self.devices * self.accumulate)

    def __str__(self) -> str:
        return f"{self.strategy} {self.devices}×{self.accumulate}×{self.micro}"


Case = tuple[str, Layout]  # optimizer, layout
WHOLE = Layout("one", 1, 1)
LAYOUTS = (WHOLE, Layout("one", 1, 4), *(Layout(name, 2, n) for name in ("ddp", "fsdp") for n in (1, 2)))
CASES: tuple[Case, ...] = tuple((optimizer, layout) for optimizer in OPTIMIZERS for layout in LAYOUTS)


@dataclass(frozen=True)
class Run:
    """steps, validations: the rows of metrics.jsonl."""

    folder: Path
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]

    @property
    def losses(self) -> list[float]:
        """Nats per token of each step."""
        return [row["loss"] for row in self.steps]


def read(folder: Path) -> Run:
    rows = read_metrics(folder)
    steps, validations = ([row for row in rows if row["kind"] == kind] for kind in ("train", "validation"))
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return Run(folder, steps, validations, saved["state_dict"])


def trainer(layout: Layout) -> list[str]:
    if layout.strategy == "one":
        return ["trainer=cpu"]
    return [f"trainer={layout.strategy}", "trainer.accelerator=cpu", f"trainer.devices={layout.devices}"]


def words(folder: Path, optimizer: str, layout: Layout) -> list[str]:
    """The command, without its name and that of the run."""
    place = [f"runs={folder / 'runs'}", f"data.path={folder / 'text.txt'}"]
    # Where bfloat16 is fast Muon rounds its updates to three digits, and what differs by rounding would differ by more.
    how = {"adamw": ["optimizer=adamw"], "muon": ["optimizer=muon", "optimizer.compute=float32"]}
    return [*SAME, *place, "lr=0.01", f"training.accumulate={layout.accumulate}", *trainer(layout), *how[optimizer]]


def measure(folder: Path, cases: Iterable[Case] = CASES, tracked: Case | None = None) -> dict[Case, Run]:
    """Trains every case below `folder`, and `tracked` with wandb."""
    (folder / "text.txt").write_text(text(40_000), encoding="utf-8")
    found = {}
    for optimizer, layout in cases:
        name = f"{optimizer}-{layout.strategy}-{layout.devices}-{layout.accumulate}"
        typed = [
            *words(folder, optimizer, layout),
            *["logger=wandb"] * ((optimizer, layout) == tracked),
            f"name={name}",
        ]
        train(folder / "said" / name, layout.devices, typed)
        found[optimizer, layout] = read(folder / "runs" / name)
    return found


def train(said: Path, devices: int, typed: list[str]) -> None:
    """`softattn train` on `devices` processes, which leave what they print in the folder `said`."""
    codes = ranks.wait(ranks.start(devices, said, ranks.command, typed), 120)
    assert codes == [0] * devices, (codes, *(file.read_text() for file in sorted(said.iterdir())))


def differences(run: Run, other: Run) -> tuple[float, float]:
    """The largest |difference| of two losses of one step, and of two weights at the end."""
    assert len(run.losses) == len(other.losses) and run.weights.keys() == other.weights.keys()
    losses = max(abs(a - b) for a, b in zip(run.losses, other.losses, strict=True))
    return losses, max(float((run.weights[name] - other.weights[name]).abs().max()) for name in run.weights)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    shown = [1, 5, 10, 15, 20]
    figures = [*(f"step {step}" for step in shown), "validation", "largest |Δ loss|", "largest |Δ weight|"]
    table = Table("optimizer", "devices × accumulate × micro", *figures)
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(Path(folder))
        for (optimizer, layout), run in runs.items():
            loss, weight = differences(runs[optimizer, WHOLE], run)
            values = [*(run.losses[step - 1] for step in shown), run.validations[-1]["loss"]]
            table.add_row(optimizer, str(layout), *(f"{v:.7f}" for v in values), f"{loss:.1e}", f"{weight:.1e}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
