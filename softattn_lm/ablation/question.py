"""A question in a yaml file or on a command line -> a plan.

configs/ablation/<name>.yaml, or a path     question, hypothesis, arms, baseline, base, seeds, metric, smallest,
                                            tune, match, ladder, budget, lines
attention=sdpa,linear,my_kernel.py:Mine     the one word with several values: the arms, the first is the baseline
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from softattn_lm.ablation.plan import Metric, Plan, Tune
from softattn_lm.config.nearest import meant
from softattn_lm.config.rules import BUDGETS
from softattn_lm.config.tree import choices, config_folder
from softattn_lm.errors import UserError
from softattn_lm.runs.names import valid_name

# The recipe that favours no arm, and the tracker, unless a question or a command line says otherwise.
BASE = ["model=plain", "logger=wandb"]
KEYS = (
    *("question", "hypothesis", "arms", "baseline", "base", "seeds", "metric", "smallest", "tune"),
    *("match", "ladder", "budget", "lines"),
)
SEEDS, FIRST_TUNING_SEED = 5, 1000
_OWN_CODE = re.compile(r"[^\s:]+(\.py)?:[A-Za-z_]\w*")


def read_question(word: str) -> tuple[str, dict[str, Any], str, str]:
    """(name, what it says, its text's sha256, its path) of a shipped question or of a yaml file.

    Raises UserError for a name that is not there and for a file that states no question.
    """
    shipped = config_folder() / "ablation" / f"{word}.yaml"
    path = Path(word).expanduser()
    if not word.endswith((".yaml", ".yml")):
        path = shipped if shipped.is_file() else path.with_name(f"{path.name}.yaml")
    if not path.is_file():
        known = choices(config_folder(), "ablation")
        raise UserError(
            f"no question {word}{meant(word, known)}; there are {', '.join(known)}, or give a yaml file of your own"
        )
    try:
        text = path.read_text(encoding="utf-8")
        said = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is no valid yaml: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(said, dict) or not isinstance(said.get("arms"), dict) or not said["arms"]:
        raise UserError(f"{path} states no question: it needs arms, a mapping from names to settings")
    for key in said:
        if key not in KEYS:
            raise UserError(f"{path}: unknown key {key}{meant(str(key), KEYS) or '; there are ' + ', '.join(KEYS)}")
    return path.stem, said, hashlib.sha256(text.encode()).hexdigest(), str(path)


def typed_arms(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(arms, the words for all of them): the one word with several values makes the arms, in the order typed."""
    swept = [word for word in words if len(values(word)) > 1]
    if len(swept) > 1:
        raise UserError(
            f"{swept[0]} and {swept[1]} both have several values, and arms are one list; write them in a yaml file, "
            "each with what it sets"
        )
    if not swept:
        return {}, list(words)
    key = swept[0].partition("=")[0]
    arms: dict[str, list[str]] = {}
    for value in values(swept[0]):
        name = arm_name(key, value)
        if name in arms:
            raise UserError(f"{swept[0]} names {value} twice")
        arms[name] = [f"{key}={value}"]
    return arms, [word for word in words if word != swept[0]]


def values(word: str) -> list[str]:
    """The values of `key=a,b,c`; commas inside brackets and quotes separate none."""
    found, depth, quote, start = [], 0, "", 0
    text = word.partition("=")[2]
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[({":
            depth += 1
        elif sign in "])}":
            depth -= 1
        elif sign == "," and depth == 0:
            found.append(text[start:index])
            start = index + 1
    return [*found, text[start:]]


def arm_name(key: str, value: str) -> str:
    """sdpa, my_kernel.py:Mine -> Mine, model.n_head=4 -> n_head_4: a folder name."""
    text = value.rpartition(":")[2] if _OWN_CODE.fullmatch(value) else value
    if not re.search(r"[A-Za-z]", text) or text in ("true", "false", "null"):
        text = f"{key.rpartition('.')[2]}_{text}"
    return re.sub(r"[^\w.-]+", "_", text).strip("-._")


def own_code(words: Sequence[str]) -> list[str]:
    """attention=my_kernel.py:Mine as `train` has it: attention=custom and its target."""
    found: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "attention" and _OWN_CODE.fullmatch(value):
            found += ["attention=custom", f"attention.target={value}"]
        else:
            found.append(word)
    return found


def make_plan(
    said: dict[str, Any], words: Sequence[str], name: str, sha256: str | None = None, file: str | None = None
) -> Plan:
    """`said`: the question, with what was typed for its keys; `words`: typed overrides for all arms.

    Raises UserError for a value that is none.
    """
    arms = {_arm(name): own_code(_words(f"arms.{name}", given)) for name, given in said["arms"].items()}
    if len(arms) < 2:
        raise UserError("an ablation compares two arms or more; type attention=sdpa,linear, or name a question")
    baseline = said.get("baseline") or next(iter(arms))
    if baseline not in arms:
        raise UserError(f"baseline={baseline} is no arm{meant(str(baseline), arms)}; there are {', '.join(arms)}")
    ladder = said.get("ladder")
    seeds, tune = _seeds(said.get("seeds") or SEEDS), _tune(said.get("tune"))
    if tune is not None and (both := sorted({*seeds} & {*tune.seeds})):
        raise UserError(f"seeds={seeds}: rates are chosen on {both}, which can then report nothing; choose other seeds")
    return Plan(
        name=name,
        arms=arms,
        baseline=baseline,
        base=together(BASE, _words("base", said.get("base") or []), own_code(words)),
        seeds=seeds,
        question=said.get("question"),
        hypothesis=said.get("hypothesis"),
        tune=tune,
        metric=_metric(said.get("metric") or "loss"),
        smallest=_positive("smallest", said.get("smallest") or 0.01),
        match=_one_of("match", said.get("match") or "none", ("none", "parameters", "flops", "time", "tokens")),
        ladder=None if ladder is None else _words("ladder", ladder),
        budget_minutes=None if said.get("budget") is None else _positive("budget", said["budget"]),
        question_file=file,
        sha256=sha256,
        lines=_one_of("lines", True if said.get("lines") is None else said["lines"], (True, False)),
    )


def together(*lists: Sequence[str]) -> list[str]:
    """Overrides of which the later win, each key once; of budgets there is one."""
    found: dict[str, str] = {}
    for word in (word for words in lists for word in words):
        key = word.partition("=")[0].lstrip("+")
        for same in BUDGETS if key in BUDGETS else (key,):
            found.pop(same, None)
        found[key] = word
    return [*found.values()]


def short_name(plan: Plan) -> str:
    """Of a question that was typed: the same words find the same folder again, with more seeds too."""
    tuned = None if plan.tune is None else plan.tune.grid
    asked = [plan.arms, plan.base, plan.match, plan.ladder, tuned, plan.metric.name, plan.smallest]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:6]
    return f"{'-'.join(plan.arms)[:40].strip('-._')}-{digest}"


def save(plan: Plan, said: dict[str, Any], path: Path) -> None:
    """The yaml of a question that was typed."""
    base = [word for word in plan.base if word not in BASE]
    content = {
        "question": plan.question or f"What does {plan.baseline} lose or gain against the others?",
        "hypothesis": plan.hypothesis,
        "arms": plan.arms,
        "baseline": plan.baseline,
        "base": base,
        "seeds": said.get("seeds") or SEEDS,
        "metric": plan.metric.name,
        "smallest": plan.smallest,
        "tune": said.get("tune"),
        "match": plan.match,
        "ladder": plan.ladder,
        "budget": plan.budget_minutes,
        "lines": plan.lines,
    }
    head = f"# {', '.join(plan.arms)}: run it with  python scripts/ablate.py {path}\n"
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _arm(name: Any) -> str:
    return valid_name(str(name)) if str(name) not in ("", "None") else valid_name("")


def _words(key: str, given: Any) -> list[str]:
    words = given.split() if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{key} must be settings as they are typed, such as [attention=sdpa, steps=500]")
    return list(words)


def _seeds(given: Any) -> list[int]:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 2:
        return list(range(given))
    if isinstance(given, list) and len(set(given)) == len(given) >= 2 and all(isinstance(s, int) for s in given):
        return [*given]
    raise UserError(f"seeds={given}: an interval needs 2 seeds or more; give a number, or a list of different ones")


def _positive(key: str, given: Any) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < float("inf"):
        return float(given)
    raise UserError(f"{key}={given} must be a number above 0")


def _one_of(key: str, given: Any, allowed: tuple[Any, ...]) -> Any:
    if given in allowed:
        return given
    raise UserError(
        f"{key}={given}: {key} must be one of {', '.join(map(str, allowed))}{meant(str(given), [*map(str, allowed)])}"
    )


def _metric(given: Any) -> Metric:
    said = {"name": given} if isinstance(given, str) else given
    if not isinstance(said, dict) or not said.keys() <= {"name", "split", "better", "solved"}:
        raise UserError(f"metric={given} must be loss or accuracy, or a mapping with name, split, better, solved")
    name = _one_of("metric", said.get("name", "loss"), ("loss", "accuracy"))
    better = _one_of(
        "metric.better", said.get("better") or ("lower" if name == "loss" else "higher"), ("lower", "higher")
    )
    split = _one_of("metric.split", said.get("split") or "test", ("validation", "test"))
    solved = said.get("solved", 0.99 if name == "accuracy" else None)
    return Metric(name, split, better, solved)


def _tune(given: Any) -> Tune | None:
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
