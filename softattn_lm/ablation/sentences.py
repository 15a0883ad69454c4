"""Verdicts in plain words, and what to type where there is none yet."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.question import BASE, make_plan
from softattn_lm.ablation.statistics import MOST_PAIRS, detectable, level_of_look, seed_part
from softattn_lm.ablation.verdict import Comparison
from softattn_lm.errors import UserError


@dataclass(frozen=True)
class Unit:
    """How a metric is printed: times `factor`, and what that is. sign: of a loss that a comparison is made in."""

    name: str
    factor: float
    sign: float

    def number(self, value: float, plus: bool = False) -> str:
        digits = 2 if self.factor == 100 else 4
        text = f"{value * self.factor:{'+' if plus else ''}.{digits}f}"
        return f"{0.0:.{digits}f}" if not text.strip("+-0.") else text


def unit_of(plan: Plan) -> Unit:
    sign = 1.0 if plan.metric.better == "lower" else -1.0
    return Unit("points", 100.0, sign) if plan.metric.name == "accuracy" else Unit("nats", 1.0, sign)


def at(size: str | None) -> str:
    """As in "worse at micro"; nothing where there is no ladder."""
    return "" if size is None else f" at {size}"


def percent(share: float) -> str:
    """0.98333 -> 98.3 %, 0.99429 -> 99.4 %, 0.9999 -> 99.99 %."""
    return f"{100 * share:.2f} %" if share > 0.995 else f"{100 * share:.1f} %"


def p_value(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def sentence(plan: Plan, judged: Judged, found: Comparison) -> str:
    unit, arm, base = unit_of(plan), found.arm, plan.baseline
    place = at(judged.size)
    if found.verdict == "identical":
        return f"{arm} is identical to {base}{place}: the difference is 0 to the last digit on all seeds."
    if found.interval is None:
        diverged = f"{found.diverged} of its {len(found.seeds)} runs diverged, {found.baseline_diverged} of {base}'s"
        why = f"{diverged}; sign test p = {p_value(found.p)}" if "diverged" in found.notes[0] else found.notes[0]
        word = "undetermined against" if found.verdict == "undetermined" else f"{found.verdict} than"
        return f"{arm} is {word} {base}{place}: {why}."
    mean, half = unit.sign * found.interval.mean, found.interval.half
    around = f"{len(found.seeds)} paired seeds, {percent(found.interval.level)} interval"
    size = f"{unit.number(abs(mean))} ± {unit.number(half)} {unit.name}"
    signed = f"{unit.number(mean, plus=True)} ± {unit.number(half)} {unit.name}"
    least = f"{plan.smallest * unit.factor:g} {unit.name}"
    if found.verdict in ("better", "worse"):
        less = "" if abs(mean) >= plan.smallest else f", which is less than the {least} that matter"
        return f"{arm} is {found.verdict} than {base}{place} by {size} ({around}){less}."
    if found.verdict == "equivalent":
        return f"{arm} is equivalent to {base}{place}: its difference, {signed}, lies within ±{least} ({around})."
    return f"{arm} against {base}{place} is undetermined: the difference is {signed} ({around})."


@dataclass(frozen=True)
class Needed:
    """What would settle verdicts that are undetermined: said in words, and what to type for all of them."""

    said: list[str]
    command: str | None


def what_is_missing(plan: Plan, folder: Path, judged: list[Judged]) -> Needed:
    unit, said, most = unit_of(plan), dict[str, list[str]](), 0
    for each in judged:
        minutes = sum(each.seconds.values()) / max(1, slots(folder)) / 60
        for found in each.comparisons:
            arm = found.arm + at(each.size)
            if found.verdict != "undetermined":
                continue
            if found.more_seeds is None:
                if found.interval is not None:
                    said.setdefault(f"more seeds alone will not do: {_too_much(plan, each, found)}", []).append(arm)
                continue
            most = max(most, found.more_seeds)
            took = f", about {found.more_seeds * minutes:.0f} minutes here," if found.more_seeds * minutes >= 1 else ""
            what = f"would find a difference of {plan.smallest * unit.factor:g} {unit.name} with 80 % power"
            if found.interval is None:
                what = "let a sign test decide, if they all point one way"
            said.setdefault(f"{found.more_seeds} more seeds{took} {what}", []).append(arm)
    lines = [f"{', '.join(arms)}: {what}." for what, arms in said.items()]
    return Needed(lines, command(plan, folder, len(plan.seeds) + most) if most else None)


def _too_much(plan: Plan, judged: Judged, found: Comparison) -> str:
    """What still blurs the difference when seeds do not any more, at the level of the next look."""
    unit, d, number = unit_of(plan), np.array(found.differences), max(1, judged.look.number)
    seeds, share = seed_part(d).variance, found.text + found.rates
    alpha = found.alpha * level_of_look(number + 1) / level_of_look(number)
    fixed = seeds * share / (1 - share) if share < 1 else 0.0
    least = detectable(float(d.std(ddof=1)), MOST_PAIRS, alpha, fixed=fixed)
    what = {"the test text": found.text, "the choice of learning rates": found.rates}
    whose = " and ".join(name for name, of in what.items() if of >= 0.5 * max(what.values()))
    remedy = "more tuning seeds" if found.rates > found.text else "a larger test part (data.test_fraction)"
    return (
        f"with {MOST_PAIRS} of them, {whose} would still blur it so far that {unit.number(least)} {unit.name} is the "
        f"smallest difference found, and {plan.smallest * unit.factor:g} matter; {remedy} would"
    )


def slots(folder: Path) -> int:
    """How many runs went at the same time here."""
    file = folder / "slots.jsonl"
    if not file.is_file():
        return 1
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return max(1, len({json.loads(line)["slot"] for line in lines if line.startswith("{")}))


def command(plan: Plan, folder: Path, seeds: int) -> str:
    """What asks the same question in the same folder with more seeds."""
    words, name = _asked(plan)
    settings = [f"seeds={seeds}"]
    if plan.seeds != list(range(len(plan.seeds))):
        new = range(max(plan.seeds) + 1, max(plan.seeds) + 1 + seeds - len(plan.seeds))
        settings = [f"seeds=[{','.join(map(str, [*plan.seeds, *new]))}]"]
    here = folder.resolve()  # it may have been renamed, or be a copy
    if name != here.name:
        settings.append(f"name={here.name}")
    if here.parent != Path("runs").resolve():
        settings.append(f"runs={here.parent}")
    return "softattn ablate " + " ".join(map(shlex.quote, [*words, *plan.execution, *settings]))


def _asked(plan: Plan) -> tuple[list[str], str | None]:
    """(the question and its settings as they were typed, the name the folder has by itself)."""
    file = None if plan.question_file is None else Path(plan.question_file)
    if file is not None:
        shipped = file.parent.name == "ablation" and file.parent.parent.name == "configs"
        said = _said(file)
        own = [word for word in plan.base if word not in (*BASE, *(said.get("base") or []))]
        return [file.stem if shipped else str(file), *own, *_typed(plan, said)], file.stem
    keys = {words[0].partition("=")[0] for words in plan.arms.values() if words}
    values = [_value(words) for words in plan.arms.values()]
    arms = f"{next(iter(keys))}={','.join(values)}" if len(keys) == 1 else ",".join(plan.arms)
    typed = [arms, *(word for word in plan.base if word not in BASE)]
    return [*typed, *_typed(plan, {})], None


def _typed(plan: Plan, said: dict[str, Any]) -> list[str]:
    """The settings by which a plan differs from what its file says by itself."""
    arms: dict[str, Any] = {"arms": {arm: [] for arm in plan.arms}}
    try:
        usual = make_plan(said | arms, [], plan.name)
    except UserError:  # the file was edited since, and says nothing any more
        usual = make_plan(arms, [], plan.name)
    words = [
        f"{key}={now}"
        for key in ("question", "hypothesis", "baseline", "match")
        if (now := getattr(plan, key)) is not None and now != getattr(usual, key)
    ]
    words += [f"metric={plan.metric.name}"] if plan.metric != usual.metric else []
    words += [f"smallest={plan.smallest!r}"] if plan.smallest != usual.smallest else []
    words += [f"ladder={','.join(plan.ladder)}"] if plan.ladder and plan.ladder != usual.ladder else []
    words += [f"budget={plan.budget_minutes!r}"] if plan.budget_minutes != usual.budget_minutes else []
    words += [f"lines={str(plan.lines).lower()}"] if plan.lines != usual.lines else []
    if plan.tune == usual.tune:
        return words
    if plan.tune is None:
        return [*words, "tune=none"]
    trials = len(plan.tune.grid)
    plainly = make_plan(arms | {"tune": {"trials": trials}}, [], plan.name).tune
    # trials= keeps what a file says of the factor and the seeds; tune=lr puts the usual ones in their place.
    return [*words, *(["tune=lr"] if plan.tune == plainly else []), f"trials={trials}"]


def _value(words: list[str]) -> str:
    own = [word.partition("=")[2] for word in words if word.startswith("attention.target=")]
    return own[0] if own else words[0].partition("=")[2]


def _said(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def on_the_ladder(plan: Plan, judged: list[Judged]) -> list[str]:
    """Whether a verdict holds at every size."""
    if len(judged) < 2:
        return []
    said = []
    for arm in plan.arms:
        words = {str(each.size): c.verdict for each in judged for c in each.comparisons if c.arm == arm}
        if len(words) < 2:
            continue
        if len({*words.values()}) == 1:
            said.append(f"{arm} is {next(iter(words.values()))} at all {len(words)} sizes.")
        else:
            each = ", ".join(f"{word} at {size}" for size, word in words.items())
            said.append(f"{arm}: the verdict does not hold at every size: {each}.")
    return said
