"""What may not stand in one table is refused, and what looks odd is said, each by the path of its run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from softattn_lm.ablation.frame import Run
from softattn_lm.ablation.plan import Plan
from softattn_lm.errors import UserError

# What the seeds of one arm have in common; where it runs and what is written down may differ.
_LEARNED_WITH = ("steps", "tokens", "epochs", "batch_size", "lr", "tokenizer", "model", "optimizer", "schedule")
_BUDGET = ("steps", "tokens", "epochs", "match", "batch_size", "context")


def require_one_table(plan: Plan, runs: Sequence[Run]) -> None:
    """Raises UserError for runs on other data, with another end of the schedule, or of an arm that is not one arm.

    `runs`: of one size, of the report stage.
    """
    begun = [run for run in runs if run.summary]
    _require_same("data", begun, {run.path: run.summary.get("fingerprint") for run in begun}, "other data")
    for arm in {run.arm: None for run in runs}:
        own = [run for run in runs if run.arm == arm]
        for key in _LEARNED_WITH:
            values = {run.path: json.dumps(run.config.get(key), sort_keys=True) for run in own}
            _require_same(key, own, values, f"another {key}")
        ended = [run for run in own if run.end == "finished"]
        _require_same("steps", ended, {run.path: run.steps for run in ended}, "another end of its schedule")
    if plan.match not in ("flops", "time", "tokens"):
        free = {arm for arm, words in plan.arms.items() if any(_key(w) in (*_BUDGET, "schedule") for w in words)}
        kept = [run for run in runs if run.arm not in free]
        for key in ("steps", "tokens", "epochs", "schedule"):
            values = {run.path: json.dumps(run.config.get(key), sort_keys=True) for run in kept}
            _require_same(key, kept, values, "another end of its schedule" if key != "schedule" else "another schedule")


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+").rpartition(".")[2]


def _require_same(key: str, runs: Sequence[Run], values: dict[str, Any], what: str) -> None:
    known = {path: value for path, value in values.items() if value is not None}
    first = next(iter(known), "")
    for path, value in known.items():
        if value != known[first]:
            raise UserError(
                f"{path} has {what} than {first} ({key} {_short(value)} against {_short(known[first])}), and one table "
                "compares like with like; move one of them out of the folder"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def oddities(plan: Plan, runs: Sequence[Run], split: str) -> list[str]:
    """`runs`: of the report stage, all sizes."""
    said = [
        f"{run.path} is of no arm or seed that was planned, and is left out"
        for run in runs
        if run.arm not in plan.arms or run.seed not in plan.seeds or run.size not in plan.sizes
    ]
    scored = [(run, run.summary["scores"][split]["loss"]) for run in runs if run.end == "finished"]
    for (one, loss), (two, other) in combinations(scored, 2):
        if loss == other and (one.arm, one.size) == (two.arm, two.size):
            said.append(f"{one.path} and {two.path} have the same loss to the last digit: their seed changed nothing")
    return said
