"""The same global batch of 8 on 1 and 2 processes, in 1 to 4 accumulation steps: what it changes. Prints a table.

    python tests/device_matrix.py

Processes talk over gloo on this machine's processor. One process with the whole batch is what the others are compared
with, after 20 steps without dropout.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from softattn_lm.runs import read_metrics
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
    "schedule=constant",
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

    @property
    def words(self) -> list[str]:
        trainer = [f"trainer={self.strategy}", "trainer.accelerator=cpu", f"trainer.devices={self.devices}"]
        return ["trainer=cpu"] * (self.devices == 1) or trainer

    def __str__(self) -> str:
        return f"{self.strategy if self.devices > 1 else 'one'} {self.devices}×{self.accumulate}×{self.micro}"


WHOLE = Layout("one", 1, 1)
LAYOUTS = (
    WHOLE,
    Layout("one", 1, 4),
    Layout("ddp", 2, 1),
    Layout("ddp", 2, 2),
    Layout("fsdp", 2, 1),
    Layout("fsdp", 2, 2),
)


@dataclass(frozen=True)
class Run:
    """losses: of each step, nats per token. validations: the rows of metrics.jsonl."""

    folder: Path
    losses: list[float]
    validations: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def read(folder: Path) -> Run:
    rows = read_metrics(folder)
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return Run(
        folder,
        [row["loss"] for row in rows if row["kind"] == "train"],
        [row for row in rows if row["kind"] == "validation"],
        saved["state_dict"],
    )


def words(folder: Path, layout: Layout, optimizer: str) -> list[str]:
    """The command, without its name."""
    place = [f"runs={folder / 'runs'}", f"data.path={folder / 'text.txt'}"]
    how = [f"training.accumulate={layout.accumulate}", f"optimizer={optimizer}", *layout.words]
    # Where bfloat16 is fast Muon rounds its updates to three digits, and what differs by rounding would differ by more.
    return [*SAME, *place, *how, *["optimizer.compute=float32"] * (optimizer == "muon")]


def measure(folder: Path, layouts: tuple[Layout, ...] = LAYOUTS) -> dict[tuple[str, Layout], Run]:
    """Trains every layout with every optimizer below `folder`."""
    (folder / "text.txt").write_text(text(40_000), encoding="utf-8")
    found = {}
    for optimizer in OPTIMIZERS:
        for layout in layouts:
            name = f"{optimizer}-{layout.strategy}-{layout.devices}-{layout.accumulate}"
            said = folder / "said" / name
            processes = ranks.start(
                layout.devices, said, ranks.command, [*words(folder, layout, optimizer), f"name={name}"]
            )
            codes = ranks.wait(processes, 120)
            assert codes == [0] * layout.devices, (codes, (said / "rank0").read_text())
            found[optimizer, layout] = read(folder / "runs" / name)
    return found


def differences(run: Run, other: Run) -> tuple[float, float]:
    """The largest |difference| of two losses of one step, and of two weights at the end."""
    assert len(run.losses) == len(other.losses) and run.weights.keys() == other.weights.keys()
    losses = max(abs(a - b) for a, b in zip(run.losses, other.losses, strict=True))
    return losses, max(float((run.weights[name] - other.weights[name]).abs().max()) for name in run.weights)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    shown = [0, 4, 9, 14, 19]
    table = Table("optimizer", "devices × accumulate × micro", *(f"step {i + 1}" for i in shown), "validation")
    table.add_column("largest |Δ loss|")
    table.add_column("largest |Δ weight|")
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(Path(folder))
        for (optimizer, layout), run in runs.items():
            loss, weight = differences(runs[optimizer, WHOLE], run)
            figures = [f"{run.losses[i]:.7f}" for i in shown] + [f"{run.validations[-1]['loss']:.7f}"]
            table.add_row(optimizer, str(layout), *figures, f"{loss:.1e}", f"{weight:.1e}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
