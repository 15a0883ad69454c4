"""How often 5 runs of a recipe differ from 5 others of the same: python tests/real_baselines.py [folder]  (6 minutes)

Trains 40 baselines on 40 seeds through the engine, or finds them in the folder (runs/real_baselines), and draws 2,000
splits of 5 against 5, unpaired. All splits are of the same 40 runs, so the interval of the rate is a lower bound.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from softattn_lm.ablation import runs
from softattn_lm.ablation.statistics import success_interval
from tests.null_sweeps import unpaired_splits

HOUSE = Path(__file__).parent.parent
RUNS, SPLITS = 40, 2000
# An ablation has two arms; the other one is of a single step and is not looked at.
QUESTION = f"""
arms: {{baseline: [], step: [steps=1, training.val_every=1]}}
base:
  - model.n_layer=2
  - model.d_model=64
  - model.n_head=2
  - steps=300
  - training.val_every=300
  - lr=0.008
  - logger=none
  - training.telemetry=false
  - training.sample_every=null
seeds: {RUNS}
tune: none
"""


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        question = Path(scratch, f"{folder.name}.yaml")
        question.write_text(QUESTION, encoding="utf-8")
        words = [str(question), f"name={folder.name}", f"runs={folder.parent.resolve()}"]
        subprocess.run([sys.executable, str(HOUSE / "scripts/ablate.py"), *words], check=True)
    print(said(losses(folder)))


def losses(folder: Path) -> np.ndarray:
    """Of the finished baselines on the test part, in nats."""
    table = runs(folder)
    return table[(table.arm == "baseline") & (table.stage == "report")].loss_test.dropna().to_numpy()


def said(found: np.ndarray) -> str:
    share = unpaired_splits(found, SPLITS)
    low, high = success_interval(round(share * SPLITS), SPLITS, 0.95)
    return (
        f"{len(found)} baselines: {found.mean():.4f} nats, sd {found.std(ddof=1):.4f}; {SPLITS} splits of 5 against 5, "
        f"unpaired, at 5 %: {share:.2%} differ ({low:.2%} to {high:.2%}, were the splits independent)"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HOUSE / "runs" / "real_baselines")
