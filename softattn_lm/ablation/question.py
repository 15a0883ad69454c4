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
from pathlib import Path
from typing import Any

import yaml

from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.values import SEEDS, arm_of, metric_of, one_of, positive, seeds_of, tune_of, words_of
from softattn_lm.config.nearest import meant
from softattn_lm.config.rules import BUDGETS
from softattn_lm.config.tree import choices, config_folder
from softattn_lm.errors import UserError

# The recipe that favours no arm, and the tracker, unless a question or a command line says otherwise.
BASE = ["model=plain", "logger=wandb"]
KEYS = (
    *("question", "hypothesis", "arms", "baseline", "base", "seeds", "metric", "smallest", "tune"),
    *("match", "ladder", "budget", "lines"),
)
_OWN_CODE = re.compile(r"[^\s:]+(\.py)?:[A-Za-z_]\w*")


class _EachOnce(yaml.SafeLoader):
    """Refuses a key that stands twice, of which yaml would take the later without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"{key.value} stands in lines {seen[key.value]} and {line}; name each thing once")
            if isinstance(key, yaml.ScalarNode):
                seen[key.value] = line
        return super().construct_mapping(node, deep)


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
        said = _EachOnce(text).get_single_data()
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
    arms = {arm_of(name): own_code(words_of(f"arm {name}", given)) for name, given in said["arms"].items()}
    if len(arms) < 2:
        raise UserError("an ablation compares two arms or more; type attention=sdpa,linear, or name a question")
    baseline = said.get("baseline") or next(iter(arms))
    if baseline not in arms:
        raise UserError(f"baseline={baseline} is no arm{meant(str(baseline), arms)}; there are {', '.join(arms)}")
    ladder = said.get("ladder")
    seeds, tune = seeds_of(said.get("seeds")), tune_of(said.get("tune"))
    if tune is not None and (both := sorted({*seeds} & {*tune.seeds})):
        raise UserError(f"seeds={seeds}: rates are chosen on {both}, which can then report nothing; choose other seeds")
    return Plan(
        name=name,
        arms=arms,
        baseline=baseline,
        base=together(BASE, words_of("base", said.get("base") or []), own_code(words_of("", [*words]))),
        seeds=seeds,
        question=said.get("question"),
        hypothesis=said.get("hypothesis"),
        tune=tune,
        metric=metric_of(said.get("metric") or "loss"),
        smallest=positive("smallest", 0.01 if said.get("smallest") is None else said["smallest"]),
        match=one_of("match", said.get("match") or "none", ("none", "parameters", "flops", "time", "tokens")),
        ladder=None if ladder is None else words_of("ladder", ladder),
        budget_minutes=None if said.get("budget") is None else positive("budget", said["budget"]),
        question_file=file,
        sha256=sha256,
        lines=one_of("lines", True if said.get("lines") is None else said["lines"], (True, False)),
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
        "seeds": SEEDS if said.get("seeds") is None else said["seeds"],
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
