"""One run of an ablation: where its folder is, what its config says, and what became of it, read from disk."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from softattn_lm.ablation.lines import uniform_words
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.question import together
from softattn_lm.errors import UserError
from softattn_lm.runs.config import write_config
from softattn_lm.runs.files import write_json
from softattn_lm.runs.status import read_status
from softattn_lm.runs.versions import versions

Stage = Literal["tune", "report", "reference"]
End = Literal["finished", "diverged", "failed", "broken", "absent"]
# A checked config of `train` from overrides as they are typed; commands/ablate.py gives it.
Compose = Callable[[Sequence[str]], dict[str, Any]]
DIVERGED = "no longer finite"  # what `training` says of a run whose loss or gradient is no number any more


@dataclass(frozen=True)
class Job:
    """rate: the multiple of the arm's own lr that is tried; None in the other stages. lr: itself. arm: of a reference
    the name of its line, see lines.py.
    """

    stage: Stage
    arm: str
    seed: int
    lr: float
    size: str | None = None
    rate: float | None = None

    @property
    def path(self) -> str:
        """Of its run folder, below that of the ablation."""
        parts = [self.stage, *([] if self.size is None else [self.size]), self.arm]
        name = f"seed-{self.seed}"
        return "/".join([*parts, name if self.rate is None else f"lr-{self.lr:.4g}-{name}"])


@dataclass(frozen=True)
class Outcome:
    """loss: on the validation split, with the final weights. A run that diverged is a result: its loss is infinite."""

    end: End
    loss: float = math.inf
    error: str | None = None


class Configs:
    """The settings of each arm at each size; every run differs from them in seed and lr only."""

    def __init__(self, plan: Plan, compose: Compose, execution: Sequence[str] = ()) -> None:
        self.plan, self.compose, self.execution = plan, compose, list(execution)
        self._known: dict[tuple[str | None, str | None, float | None], dict[str, Any]] = {}

    def words(self, arm: str | None, size: str | None) -> list[str]:
        """What one would type for this arm. None: the reference, which is the baseline with the uniform kernel."""
        if arm is None:
            return uniform_words(self.words(self.plan.baseline, size))
        sized = [] if size is None else [f"model/size={size}"]
        matched = self.plan.matched.get(size or "", {}).get(arm, [])
        return together(self.plan.base, sized, self.plan.arms[arm], matched, self.execution)

    def of(self, arm: str | None, size: str | None, lr: float | None = None) -> dict[str, Any]:
        """Raises UserError, naming the arm, for settings that do not fit."""
        key = (arm, size, lr)
        if key not in self._known:
            words = self.words(arm, size)
            try:
                self._known[key] = self.compose(words if lr is None else together(words, [f"lr={lr!r}"]))
            except UserError as error:
                raise UserError(f"{'the reference' if arm is None else f'arm {arm}'}: {error}") from None
        return self._known[key]

    def lr(self, arm: str, size: str | None) -> float:
        return float(self.of(arm, size)["lr"])

    def of_job(self, job: Job, runs: str) -> dict[str, Any]:
        cfg = self.of(None if job.stage == "reference" else job.arm, job.size, job.lr)
        training = cfg["training"] | {"sample_every": None, "keep_steps": []}
        training["score"] = ["validation"] if job.stage == "tune" else ["validation", "test"]
        if job.stage == "tune":
            training["telemetry"] = False
        place = {"name": self.plan.name, "arm": job.arm, "seed": job.seed, "stage": job.stage, "size": job.size}
        return cfg | {
            "seed": job.seed,
            "name": f"{self.plan.name}/{job.path}",
            "runs": runs,
            "training": training,
            "ablation": place | {"rate": job.rate},
        }


def make_folder(root: Path, job: Job, config: dict[str, Any]) -> Path:
    """The run folder of a job, made whole or found as it is. `train resume=` starts in it, or goes on."""
    folder = root / job.path
    if (folder / "config.yaml").is_file():
        return folder
    waiting = root / f".{secrets.token_hex(4)}.tmp"
    waiting.mkdir(parents=True)
    write_config(waiting, config)
    write_json(waiting / "versions.json", versions())
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.rename(waiting, folder)
    return folder


def read_summary(folder: Path) -> dict[str, Any]:
    """Of a run; {} where there is none. Raises UserError for one that is damaged."""
    file = folder / "summary.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file} is damaged: {' '.join(str(error).split())}; {scored_again(folder)}") from None
    return found if isinstance(found, dict) else {}


def scored_again(folder: Path) -> str:
    """What to type so that a finished run writes its summary and scores anew, with the weights that it has."""
    return f"remove {folder / 'summary.json'} and type softattn train resume={folder}"


def outcome(root: Path, job: Job) -> Outcome:
    return outcome_in(root / job.path, job.stage)


def outcome_in(folder: Path, stage: Stage) -> Outcome:
    """Only a completed schedule is a result, or one that ended because its numbers ran away."""
    if not (folder / "config.yaml").is_file():
        return Outcome("absent")
    status = read_status(folder)
    state, error = status.get("state"), status.get("error")
    if state == "failed":
        return Outcome("diverged" if DIVERGED in (error or "") else "failed", error=error)
    if state != "finished" or status["step"] != status["steps"] or not (folder / "summary.json").is_file():
        return Outcome("broken", error=error)
    scores = read_summary(folder).get("scores") or {}
    if not {"validation"} <= scores.keys() or (stage != "tune" and "test" not in scores):
        return Outcome("broken", error="its final weights were not scored")
    loss = scores["validation"]["loss"]
    if loss is None or not math.isfinite(loss):
        return Outcome("diverged", error="its loss is no longer finite")
    return Outcome("finished", loss)
