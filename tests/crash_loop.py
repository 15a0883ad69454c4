"""kill -9, again and again, at random instants of a run that checkpoints every step; resumed each time.

    python tests/crash_loop.py            30 times, about three minutes
    python tests/crash_loop.py 100 7      100 times, at the instants of seed 7

In the end weights, optimizer state and rows are those of the run that nobody killed, bit for bit. Exit status 1 if not.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from softattn_lm.runs.metrics import read_metrics
from softattn_lm.training.checkpoint import read_checkpoint
from tests import sabotage
from tests.warm import Child, tiny_words

STEPS_PER_LIFE = 10


def crash_loop(folder: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> dict[str, int]:
    """What the kills met. Raises AssertionError when the run is not the one that nobody killed."""
    settings = [
        f"steps={kills * (STEPS_PER_LIFE + 4) + 10}", "training.save_every=1", "training.val_every=7",
        "training.keep_steps=log", "training.log_every=3", "training.sample_every=25", "logger=csv",
    ]  # fmt: skip
    assert Child(folder, *tiny_words(folder, "name=whole", *settings)).wait(600) == 0
    run, chance = folder / "runs" / "killed", random.Random(seed)
    met = {"kills": 0, "within a save": 0, "within a row": 0, "before a step": 0, "steps done again": 0}
    while met["kills"] < kills:
        words = ["resume=killed"] if run.exists() else tiny_words(folder, "name=killed", *settings)
        before = _steps_saved(run)
        # A little slower, so that an instant is as likely to be in a step as in a save.
        child = Child(folder, *words, sabotage=sabotage.slow_steps, arguments=(0.004,))
        deadline = time.monotonic() + chance.uniform(0.0, 3.0)
        limit = before + chance.randint(0, STEPS_PER_LIFE)
        while child.process.exitcode is None and time.monotonic() < deadline and _rows(run) <= limit:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        assert child.process.exitcode is None, child.said
        child.signal(signal.SIGKILL)
        assert child.wait() == 128 + signal.SIGKILL
        met["kills"] += 1
        met["within a save"] += any((run / "checkpoints").glob("*.tmp"))
        met["within a row"] += not _whole_lines(run / "metrics.jsonl")
        met["before a step"] += _steps_saved(run) == before
        met["steps done again"] += max(0, _rows(run) - _steps_saved(run))
        say(f"kill {met['kills']}: step {_steps_saved(run)} is saved, {_rows(run)} rows")
    assert Child(folder, "resume=killed").wait(600) == 0
    _compare(run, folder / "runs" / "whole")
    return met


def _steps_saved(run: Path) -> int:
    """0 before the first checkpoint. A file that cannot be read raises, which is what must never happen."""
    last = run / "checkpoints" / "last.ckpt"
    return int(read_checkpoint(last)["global_step"]) if last.exists() else 0


def _rows(run: Path) -> int:
    return sum(row["kind"] == "train" for row in read_metrics(run))


def _whole_lines(file: Path) -> bool:
    return not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")


def _compare(run: Path, whole: Path) -> None:
    rows, others = ([{**row, "seconds": 0} for row in read_metrics(folder)] for folder in (run, whole))
    assert rows == others, "rows differ"
    assert (run / "samples.txt").read_bytes() == (whole / "samples.txt").read_bytes(), "samples differ"
    names, other_names = (sorted(p.name for p in (folder / "checkpoints").iterdir()) for folder in (run, whole))
    assert names == other_names, (names, other_names)
    for name in names:
        saved, other = (read_checkpoint(folder / "checkpoints" / name) for folder in (run, whole))
        for part in ("state_dict", "optimizer_states", "loops", "global_step"):
            assert equal(saved[part], other[part]), f"{part} of {name} differs"


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def main() -> None:
    kills, seed = (int(word) for word in (sys.argv[1:] + ["30", "0"][len(sys.argv) - 1 :])[:2])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        met = crash_loop(Path(folder), kills, seed)
    print(", ".join(f"{count} {what}" for what, count in met.items()), f"in {time.monotonic() - began:.0f} s")
    print("weights, optimizer state, checkpoints, rows and samples are those of the run that nobody killed")


if __name__ == "__main__":
    main()
