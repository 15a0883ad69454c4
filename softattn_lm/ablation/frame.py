"""The run folders of an ablation as records, and as one tidy table: `softattn_lm.ablation.runs(folder)`.

Read from config.yaml, status.json, summary.json and scores/<split>.npz alone, so a folder may be moved, copied from a
cluster or still be growing.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from softattn_lm.ablation.jobs import End, Stage, outcome_in, read_summary, scored_again
from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config
from softattn_lm.runs.status import read_status
from softattn_lm.shares import by_gap, by_pairs

if TYPE_CHECKING:
    import pandas

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Of the final weights, per window in reading order: see training/scores.py. correct and below: of a task."""

    nats: Array
    tokens: Array
    position_nats: Array | None = None
    position_tokens: Array | None = None
    correct: Array | None = None
    answers: Array | None = None
    pairs: Array | None = None
    gap_from: Array | None = None
    gap_correct: Array | None = None
    gap_answers: Array | None = None

    def value(self, metric: str) -> float:
        """nats per token, or the share of answers that are right; NaN where the file holds no answers."""
        return float(self.windows(metric).mean())

    def windows(self, metric: str) -> Array:
        """(W,) each window's part of the value, so that their mean is the value however long windows are."""
        part, whole = (self.correct, self.answers) if metric == "accuracy" else (self.nats, self.tokens)
        if part is None or whole is None:
            return np.full(len(self.nats), np.nan)
        return part * (len(part) / whole.sum())

    def places(self) -> dict[str, float]:
        """{"early", "late", "gain"}: nats per token in the first and last quarter of a window; {} if unknown."""
        if self.position_nats is None or self.position_tokens is None or len(self.position_nats) < 4:
            return {}
        quarter = len(self.position_nats) // 4
        early, late = (
            float(self.position_nats[part].sum() / max(1.0, self.position_tokens[part].sum()))
            for part in (slice(0, quarter), slice(-quarter, None))
        )
        return {"early": early, "late": late, "gain": early - late}

    def shares(self) -> dict[str, dict[str, float]]:
        """{"pairs": {"4": accuracy, ..}, "gap": {"1": .., "2-3": ..}}; {} for a text."""
        if self.pairs is None or self.gap_from is None:
            return {}
        counts = {name: values for name, values in vars(self).items() if values is not None}
        pairs = {str(number): share.accuracy for number, share in by_pairs(counts).items()}
        return {"pairs": pairs, "gap": {gap: share.accuracy for gap, share in by_gap(counts).items()}}


@dataclass(frozen=True)
class Run:
    """path: below the ablation's folder. end: "broken" stands for runs at work too; `state` is what they say."""

    path: str
    folder: Path
    stage: Stage
    size: str | None
    arm: str
    seed: int
    end: End
    state: str | None
    error: str | None
    step: int
    steps: int
    config: dict[str, Any]
    summary: dict[str, Any]

    @property
    def lr(self) -> float:
        return float(self.config["lr"])

    def scores(self, split: str) -> Scores | None:
        """None where nothing was scored. Raises UserError for a file that is damaged."""
        file = self.folder / "scores" / f"{split}.npz"
        if not file.is_file():
            return None
        try:
            with np.load(file) as found:
                arrays = {key: np.asarray(found[key], dtype=float) for key in found.files}
            return Scores(**{key: arrays[key] for key in Scores.__dataclass_fields__ if key in arrays})
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            said = " ".join(str(error).split())
            raise UserError(f"{file} is damaged: {said}; {scored_again(self.folder)}") from None


def read_runs(folder: Path) -> list[Run]:
    """All runs of the ablation, in the order of their paths. Raises UserError for a run that is none of it."""
    files = [file for stage in ("tune", "report", "reference") for file in (folder / stage).rglob("config.yaml")]
    return [_read(folder, file.parent) for file in sorted(files)]


def _read(root: Path, folder: Path) -> Run:
    path = folder.relative_to(root).as_posix()
    config = read_config(folder)
    place = config.get("ablation")
    if not isinstance(place, dict) or not {"arm", "seed", "stage"} <= place.keys() or "lr" not in config:
        raise UserError(f"{folder} is no run of an ablation: its config.yaml names no arm, seed and stage")
    parts = [place["stage"], *([place["size"]] if place.get("size") else []), place["arm"]]
    if path.split("/")[:-1] != parts or config.get("seed") != place["seed"]:
        raise UserError(f"{folder} holds a run of {'/'.join(parts)}, seed {place['seed']}; put it where it belongs")
    if not path.endswith(f"seed-{place['seed']}"):
        raise UserError(f"{folder} holds seed {place['seed']}; put it where it belongs")
    status = read_status(folder)
    found = outcome_in(folder, place["stage"])
    return Run(
        path, folder, place["stage"], place.get("size"), place["arm"], place["seed"], found.end, status.get("state"),
        found.error, status.get("step") or 0, status.get("steps") or 0, config, read_summary(folder),
    )  # fmt: skip


def tidy(runs: list[Run], test: bool = True) -> list[dict[str, Any]]:
    """One row per run; without `test`, none of what was scored on the test part."""
    rows = []
    for run in runs:
        row: dict[str, Any] = {
            "stage": run.stage, "size": run.size, "arm": run.arm, "seed": run.seed,
            "rate": run.config["ablation"].get("rate"), "lr": run.lr, "end": run.end, "state": run.state,
            "step": run.step, "steps": run.steps,
        }  # fmt: skip
        for split in ("validation", *(["test"] if test else [])):
            scored = (run.summary.get("scores") or {}).get(split) or {}
            row |= {f"{key}_{split}": scored.get(key) for key in ("loss", "loss_se", "accuracy")}
        keys = ("parameters", "flops_per_token", "tokens", "seconds", "tokens_per_second", "fingerprint")
        row |= {key: run.summary.get(key) for key in keys}
        rows.append(row | {"error": run.error, "path": run.path})
    return rows


def runs(folder: str | Path) -> pandas.DataFrame:
    """One row per run of an ablation, what it was scored with on the validation and on the test part among it.

    Losses in nats per predicted token; seconds of training. Raises UserError for a folder that is no ablation.
    """
    import pandas

    root = require_ablation(Path(folder))
    return pandas.DataFrame(tidy(read_runs(root)))


def require_ablation(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give that of an ablation, such as runs/scale")
    if not any(folder.iterdir()):
        raise UserError(f"{folder} is empty and no ablation")
    if not (folder / "plan.json").is_file():
        whose = "a run, not an ablation" if (folder / "config.yaml").is_file() else "no ablation"
        raise UserError(f"{folder} is {whose}: it has no plan.json")
    return folder
