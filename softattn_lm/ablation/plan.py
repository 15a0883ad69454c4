"""What an ablation is going to do, as it was agreed before its first run: <folder>/plan.json.

Seeds, arms and everything that a verdict depends on are locked there. Asked again, seeds and arms may come on top, and
are logged as added; whatever else was changed since in the question is said, logged, and left as it was planned.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json

FORMAT = 1
FILE = "plan.json"
Match = Literal["none", "parameters", "flops", "time", "tokens"]
# What may differ between two askings without a word: it decides nothing.
_FREE = ("budget_minutes", "question_file", "sha256", "name", "seeds_at_start", "matched", "lines", "execution")


@dataclass(frozen=True)
class Metric:
    """solved: the value from which on a task counts as solved; None for a text."""

    name: Literal["loss", "accuracy"] = "loss"
    split: Literal["validation", "test"] = "test"
    better: Literal["lower", "higher"] = "lower"
    solved: float | None = None


@dataclass(frozen=True)
class Tune:
    """grid: multiples of each arm's own `key`, log-spaced; every arm tries all of them on each of `seeds`."""

    key: Literal["lr"] = "lr"
    grid: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    seeds: tuple[int, ...] = (1000, 1001, 1002)


@dataclass(frozen=True)
class Plan:
    """base, arms: overrides of `train` as they are typed. matched: by size ("" without a ladder) and arm, the overrides
    that make arms alike. sha256: of the question's file when the plan was made.
    """

    name: str
    arms: dict[str, list[str]]
    baseline: str
    base: list[str]
    seeds: list[int]
    question: str | None = None
    hypothesis: str | None = None
    tune: Tune | None = None
    metric: Metric = field(default_factory=Metric)
    smallest: float = 0.01
    match: Match = "none"
    ladder: list[str] | None = None
    budget_minutes: float | None = None
    question_file: str | None = None
    sha256: str | None = None
    seeds_at_start: list[int] = field(default_factory=list)
    matched: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    lines: bool = False  # see lines.py; plans from before there were any have none
    execution: list[str] = field(default_factory=list)  # of `base` too: on what runs execute, and what is written down

    @property
    def sizes(self) -> list[str | None]:
        return [None] if self.ladder is None else [*self.ladder]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {"format": FORMAT, **_listed(asdict(self))})

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Raises UserError where there is no plan, or one of another format."""
        path = folder / FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{folder} is no ablation: it has no {FILE}") from None
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from None
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise UserError(f"{path} is no plan of format {FORMAT}, which this version reads")
        known = {f.name for f in fields(cls)}
        try:
            tune, metric = found.pop("tune"), found.pop("metric")
            if tune is not None:
                tune = Tune(tune["key"], tuple(tune["grid"]), tuple(tune["seeds"]))
            return cls(**{k: v for k, v in found.items() if k in known}, tune=tune, metric=Metric(**metric))
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}") from None


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _section(word: str) -> str:
    """logger of logger=none and of logger.project=mine: what is typed for one of them stands for all of them."""
    return word.partition("=")[0].lstrip("+").partition(".")[0]


def agreed(planned: Plan, asked: Plan) -> tuple[Plan, list[dict[str, Any]]]:
    """The plan to go on with, and the events to log: "added_arms", "added_seeds", and "edited" with what was changed
    in vain, {field: [as planned, as asked now]}.
    """
    events: list[dict[str, Any]] = []
    # Neither decides anything: lines may come or go, and runs execute as it was typed last.
    kept = [word for word in planned.execution if _section(word) not in {*map(_section, asked.execution)}]
    plan = replace(planned, lines=asked.lines, execution=[*kept, *asked.execution])
    new = {name: words for name, words in asked.arms.items() if name not in planned.arms}
    if new:
        plan = replace(plan, arms=planned.arms | new)
        events.append({"event": "added_arms", "arms": list(new)})
    seeds = [seed for seed in asked.seeds if seed not in planned.seeds]
    if seeds:
        plan = replace(plan, seeds=[*planned.seeds, *seeds])
        events.append({"event": "added_seeds", "seeds": seeds})
    before, now = _listed(asdict(planned)), _listed(asdict(asked))
    changed = {
        key: [before[key], now[key]]
        for key in before
        if key not in (*_FREE, "arms", "seeds") and before[key] != now[key]
    }
    others = {name: [words, asked.arms.get(name)] for name, words in planned.arms.items()}
    changed |= {f"arms.{name}": pair for name, pair in others.items() if pair[0] != pair[1]}
    rewritten = None not in (planned.sha256, asked.sha256) and planned.sha256 != asked.sha256
    if changed or rewritten:
        events.append({"event": "edited", "sha256": asked.sha256, "changes": changed})
    return plan, events
