"""What else has a loss on the text of an ablation, so that a difference has a scale: counting, and no lookup at all.

    measured/lines.json     {"words", "fingerprint", "text": false for a task, "context": of a window, "order": n,
                            "refused": null | why the baseline cannot have the uniform kernel,
                            "validation": {"5-gram": nats}, "test": {..}}
    reference/uniform/seed-<s>     an ordinary run folder
    with a ladder measured/<size>/lines.json and reference/<size>/uniform/seed-<s>

The n-gram is counted on the training text by whoever measures the baseline; its loss depends on a size only by the
windows that this size reads. The reference is the baseline's recipe with attention=uniform at the baseline's rate, on
the first reported seed. It is no arm: no comparison has it, and it corrects none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.question import together

FILE = "lines.json"
UNIFORM = "uniform"  # of the run, and what is typed for its attention
WORD = f"attention={UNIFORM}"


@dataclass(frozen=True)
class Line:
    """Nats per token on each part of the text; runs: of which it is the mean, 0 of what is not trained."""

    name: str
    validation: float
    test: float
    runs: int
    size: str | None = None

    def on(self, split: str) -> float:
        return self.validation if split == "validation" else self.test


def lines_file(folder: Path, size: str | None) -> Path:
    return folder.joinpath("measured", *([] if size is None else [size]), FILE)


def read_lines(folder: Path, size: str | None) -> dict[str, Any]:
    """{} before the baseline was measured."""
    file = lines_file(folder, size)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def uniform_words(words: Sequence[str]) -> list[str]:
    """The settings of an arm with the uniform kernel in place of its own."""
    return [*(word for word in words if _key(word) != "attention" and not _key(word).startswith("attention.")), WORD]


def no_reference(plan: Plan, folder: Path, size: str | None) -> str | None:
    """Why there is no run of the uniform kernel although there might be; "" where nobody asks for one, None if it is
    to be run.
    """
    found = read_lines(folder, size)
    if not plan.lines or not found.get("text"):
        return ""
    for arm, words in plan.arms.items():
        if WORD in together(plan.base, words):
            return f"arm {arm} has it"
    refused = found.get("refused")
    return None if refused is None else str(refused)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
