"""The values of a question's keys as a plan has them, or one line that says what is wrong with them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from softattn_lm.ablation.plan import Metric, Tune
from softattn_lm.config.nearest import meant
from softattn_lm.errors import UserError
from softattn_lm.runs.names import valid_name

SEEDS, FIRST_TUNING_SEED = 5, 1000
# What ablate sets in every run, and what to do instead of setting it.
_INSTEAD = {
    "seed": "each run has one of the reported seeds; type seeds=[3,4]",
    "name": "run folders are called after arm and seed; type name= beside ablate for the folder of all",
    "runs": "run folders lie in that of the ablation; type runs= beside ablate",
    "resume": "ablate itself continues the runs that were broken off; leave it out",
    "fork": "every run begins from the initial values of its seed; leave it out",
    "trust": "a file trusts nobody; type trust= beside ablate",
    "describe": "ablate trains its runs; type dry_run=true for sizes",
    "ablation": "ablate writes there which run this is; leave it out",
    "training.score": "the final weights are scored on the validation and the test part; leave it out",
    "training.sample_every": "runs write no samples; leave it out",
    "training.keep_steps": "runs keep no checkpoints but the best and the last; leave it out",
}
# Typed so, they ask for what is done anyway.
_HARMLESS = ("training.sample_every=null", "training.keep_steps=[]", "trust=null", "describe=false", "resume=null")


def arm_of(name: Any) -> str:
    """The name of an arm, which is a folder's."""
    return valid_name("" if name is None else str(name), "arm ")


def words_of(key: str, given: Any) -> list[str]:
    """Settings for the runs, as they are typed, none of them one that ablate sets itself. key: whose, "" where nobody
    is to be named.
    """
    words = given.split() if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{key} must be settings as they are typed, such as [attention=sdpa, steps=500]")
    for word in words:
        setting = word.partition("=")[0].lstrip("+~")
        instead = _INSTEAD.get("ablation" if setting.startswith("ablation.") else setting)
        if instead is not None and word not in _HARMLESS:
            raise UserError(f"{key}{': ' if key else ''}{word} would have no effect, as {instead}")
    return list(words)


def seeds_of(given: Any) -> list[int]:
    if given is None:
        return list(range(SEEDS))
    if _whole(given) and given >= 2:
        return list(range(given))
    each = given if isinstance(given, list) else [given]
    if each == given and len({*map(str, each)}) == len(each) >= 2 and all(_whole(s) and 0 <= s < 1 << 32 for s in each):
        return [*each]
    if broken := [seed for seed in each if not _whole(seed)]:
        kind = "a number with a point" if isinstance(broken[0], float) else "no number to yaml"
        raise UserError(f"seeds={given}: {broken[0]} is {kind}; seeds are whole numbers such as 5, or a list of them")
    raise UserError(
        f"seeds={given}: an interval needs 2 seeds or more; give a number, or a list of different ones from 0 on"
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def positive(key: str, given: Any) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < float("inf"):
        return float(given)
    raise UserError(f"{key}={given} must be a number above 0")


def one_of(key: str, given: Any, allowed: tuple[Any, ...]) -> Any:
    if given in allowed:
        return given
    raise UserError(
        f"{key}={given}: {key} must be one of {', '.join(map(str, allowed))}{meant(str(given), [*map(str, allowed)])}"
    )


def metric_of(given: Any) -> Metric:
    said = {"name": given} if isinstance(given, str) else given
    if not isinstance(said, dict) or not said.keys() <= {"name", "split", "better", "solved"}:
        raise UserError(f"metric={given} must be loss or accuracy, or a mapping with name, split, better, solved")
    name = one_of("metric", said.get("name", "loss"), ("loss", "accuracy"))
    better = one_of(
        "metric.better", said.get("better") or ("lower" if name == "loss" else "higher"), ("lower", "higher")
    )
    split = one_of("metric.split", said.get("split") or "test", ("validation", "test"))
    solved = said.get("solved", 0.99 if name == "accuracy" else None)
    return Metric(name, split, better, solved)


def tune_of(given: Any) -> Tune | None:
    """lr, or {trials, factor, seeds, grid}: `trials` rates around the arm's own, each `factor` times the one before."""
    if given in (None, "none"):
        return None
    said = {} if given == "lr" else given
    if not isinstance(said, dict) or not said.keys() <= {"key", "trials", "factor", "seeds", "grid"}:
        raise UserError(f"tune={given} must be lr, or a mapping with trials, factor, seeds, or with grid")
    if said.get("key", "lr") != "lr":
        raise UserError(f"tune.key={said['key']}: what is tuned is the one lr, of which every rate is a multiple")
    if "grid" in said and said.keys() & {"trials", "factor"}:
        raise UserError("tune.grid names the rates itself, and trials and factor make them; leave out one or the other")
    trials, factor, seeds = said.get("trials", 5), said.get("factor", 2), said.get("seeds", 3)
    if not isinstance(trials, int) or trials < 3 or not isinstance(factor, (int, float)) or factor <= 1:
        raise UserError(f"tune: trials={trials} must be 3 or more, and factor={factor} above 1")
    if not isinstance(seeds, int) or seeds < 3:
        raise UserError(f"tune: seeds={seeds} must be 3 or more: a choice made on fewer is a matter of luck")
    middle = trials // 2
    grid = said.get("grid") or [float(factor) ** (index - middle) for index in range(trials)]
    if not isinstance(grid, list) or len(grid) < 3 or sorted(set(grid)) != grid or grid[0] <= 0:
        raise UserError(f"tune.grid={grid} must be 3 or more rising multiples of lr, such as [0.5,1,2]")
    ratios = [b / a for a, b in pairwise(grid)]
    if max(ratios) > 1.01 * min(ratios):
        raise UserError(f"tune.grid={grid} must be evenly spaced in log lr, such as [0.5,1,2]")
    return Tune("lr", tuple(map(float, grid)), tuple(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + seeds)))
