"""What each arm costs, and the settings that make arms alike in one respect.

    measured/<arm>.json, with a ladder measured/<size>/<arm>.json     see commands/measure_arm.py
    match=parameters    model.mlp_width of every arm but the baseline
    match=flops, time   steps, so that training takes as many operations, or as long as measured alone
    match=tokens        steps, where arms differ in context or batch_size
    ladder              tokens in proportion to the baseline's parameters without embeddings

Schedules are fractions of a run, so changing its steps stretches them. What stays unlike is told, above 2 % as a
warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from softattn_lm.ablation import journal
from softattn_lm.ablation.jobs import Configs
from softattn_lm.ablation.lines import lines_file, read_lines
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.question import together
from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json

# A process that measures the config in a file, alone: (job, out, log) -> its exit status.
Measure = Callable[[Path, Path, Path], int | None]
UNLIKE = 0.02  # relative difference from which on a reader is warned
SHOWN = 5e-5  # from which on it is more than +0.00%
Costs = dict[str | None, dict[str, dict[str, Any]]]  # by size and arm; an arm that could not be built is left out


@dataclass(frozen=True)
class Residual:
    """By how much an arm still differs from the baseline in what was matched: 0.01 is 1 % more."""

    arm: str
    size: str | None
    what: str
    by: float

    def __str__(self) -> str:
        place = self.arm if self.size is None else f"{self.arm} at {self.size}"
        warning = "warning: " if abs(self.by) > UNLIKE else ""
        return f"{warning}{place} has {self.by:+.2%} {self.what} against the baseline"


def measured_file(folder: Path, arm: str, size: str | None) -> Path:
    return folder.joinpath("measured", *([] if size is None else [size]), f"{arm}.json")


def measure_all(configs: Configs, folder: Path, runs: str, measure: Measure) -> tuple[Costs, dict[str, str]]:
    """(costs, arm -> why it could not be measured). What was measured with the same settings before is read."""
    costs: Costs = {}
    faults: dict[str, str] = {}
    for size in configs.plan.sizes:
        costs[size] = {}
        for arm in configs.plan.arms:
            try:
                costs[size][arm] = _cost(configs, folder, runs, measure, arm, size)
            except UserError as error:
                faults[arm] = str(error)
    return costs, faults


def _cost(configs: Configs, folder: Path, runs: str, measure: Measure, arm: str, size: str | None) -> dict[str, Any]:
    file = measured_file(folder, arm, size)
    words = configs.words(arm, size)
    counts = configs.plan.lines and arm == configs.plan.baseline
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
        if known.get("words") == words and not (counts and read_lines(folder, size).get("words") != words):
            return known
    file.parent.mkdir(parents=True, exist_ok=True)
    job, log = file.with_suffix(".yaml"), file.with_suffix(".log")
    cfg = configs.of(arm, size) | {"runs": runs}
    task = {"config": cfg} | (_lines(configs, folder, size) if counts else {})
    job.write_text(yaml.safe_dump(task, sort_keys=False, allow_unicode=True), encoding="utf-8")
    log.unlink(missing_ok=True)
    code = measure(job, file, log)
    job.unlink()
    if code != 0:
        said = log.read_text(encoding="utf-8").strip().splitlines() if log.is_file() else []
        last = said[-1].removeprefix("error: ") if said else f"exit status {code}"
        raise UserError(f"arm {arm} cannot be measured: {last}")
    log.unlink(missing_ok=True)
    found = json.loads(file.read_text(encoding="utf-8")) | {"words": words}
    write_json(file, found)
    return found


def _lines(configs: Configs, folder: Path, size: str | None) -> dict[str, Any]:
    """What is worked out beside the cost of the baseline: see lines.py."""
    said: dict[str, Any] = {"out": str(lines_file(folder, size)), "words": configs.words(configs.plan.baseline, size)}
    said["counted"] = [str(lines_file(folder, each)) for each in configs.plan.sizes]
    try:
        return {"lines": said | {"uniform": configs.of(None, size), "refused": None}}
    except UserError as error:
        return {"lines": said | {"uniform": None, "refused": str(error)}}


def on_ladder(plan: Plan, costs: Costs) -> Plan:
    """Every size trains on tokens in proportion to its parameters; the first keeps the question's steps."""
    if plan.ladder is None or len(plan.ladder) < 2:
        return plan
    first = costs[plan.ladder[0]].get(plan.baseline)
    matched = {size: {arm: [*words] for arm, words in arms.items()} for size, arms in plan.matched.items()}
    for size in plan.ladder[1:]:
        here = costs[size].get(plan.baseline)
        if first is None or here is None:
            raise UserError(f"the baseline {plan.baseline} could not be measured at every size of the ladder")
        tokens = first["steps"] * first["tokens_per_step"]
        tokens *= here["parameters_without_embeddings"] / first["parameters_without_embeddings"]
        steps = max(1, round(tokens / here["tokens_per_step"]))
        matched[size] = {arm: together(matched.get(size, {}).get(arm, []), [f"steps={steps}"]) for arm in plan.arms}
    return replace(plan, matched=matched)


def match(plan: Plan, configs: Configs, costs: Costs) -> Plan:
    """`plan` with the settings that match each arm to the baseline. Raises UserError where nothing can be adjusted."""
    if plan.match == "none":
        return plan
    matched = {size: {arm: [*words] for arm, words in arms.items()} for size, arms in plan.matched.items()}
    for size, arms in costs.items():
        base = arms.get(plan.baseline)
        if base is None:
            raise UserError(f"the baseline {plan.baseline} could not be measured, so nothing can be matched to it")
        for arm, cost in arms.items():
            word = None if arm == plan.baseline else _adjusted(plan.match, configs, arm, size, base, cost)
            if word is not None:
                here = matched.setdefault(size or "", {})
                here[arm] = together(here.get(arm, []), [word])
    return replace(plan, matched=matched)


def residuals(plan: Plan, costs: Costs) -> list[Residual]:
    """Of what is matched; without matching, of the parameters and FLOPs, where they differ at all."""
    found = []
    for size, arms in costs.items():
        base = arms.get(plan.baseline)
        for arm, cost in arms.items():
            if base is not None and arm != plan.baseline:
                for what, value in _quantities(plan.match):
                    by = value(cost) / value(base) - 1
                    if plan.match != "none" or abs(by) >= SHOWN:
                        found.append(Residual(arm, size, what, by))
    return found


def log_matched(folder: Path, plan: Plan, costs: Costs) -> None:
    rows = [{"arm": r.arm, "size": r.size, "what": r.what, "by": r.by} for r in residuals(plan, costs)]
    journal.append(folder, "matched", match=plan.match, overrides=plan.matched, residuals=rows)


def _adjusted(
    how: str, configs: Configs, arm: str, size: str | None, base: dict[str, Any], cost: dict[str, Any]
) -> str | None:
    if how != "parameters":
        ((_, value),) = _quantities(how)
        steps = max(1, round(cost["steps"] * value(base) / value(cost)))
        return None if steps == cost["steps"] else f"steps={steps}"
    model = configs.of(arm, size)["model"]
    if cost["mlp_width"] is None or model["projections"].get("give_to_mlp"):
        raise UserError(
            f"match=parameters widens the MLP of arm {arm}, which has none or gives its own savings to it; type "
            "match=none, or projections.give_to_mlp=false"
        )
    matrices = 3 if model["mlp"] == "swiglu" else 2
    unit = model["n_layer"] * (matrices * model["d_model"] + (model["bias"] and matrices - 1))
    width = cost["mlp_width"] + round((base["parameters"] - cost["parameters"]) / unit)
    if width < 1:
        raise UserError(f"match=parameters: arm {arm} has more parameters than the baseline even without an MLP")
    return None if width == cost["mlp_width"] else f"model.mlp_width={width}"


def _quantities(how: str) -> list[tuple[str, Callable[[dict[str, Any]], float]]]:
    known: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "parameters": ("parameters", lambda cost: float(cost["parameters"])),
        "flops": ("training FLOPs", training_flops),
        "time": ("training time", lambda cost: _tokens(cost) / float(cost["tokens_per_second"])),
        "tokens": ("training tokens", lambda cost: float(_tokens(cost))),
    }
    return [known[how]] if how != "none" else [known["parameters"], known["flops"]]


def training_flops(cost: dict[str, Any]) -> float:
    return float(cost["flops_per_token"] * _tokens(cost))


def _tokens(cost: dict[str, Any]) -> int:
    return int(cost["steps"] * cost["tokens_per_step"])
