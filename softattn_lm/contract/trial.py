"""A whole trial: every property of the contract, each with a verdict or with the reason why it was not tried."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from softattn_lm.attention.pattern import Pattern
from softattn_lm.config.custom import FAILURES
from softattn_lm.contract.property import PROPERTIES, Measure, Property, Verdict, judge, not_tried
from softattn_lm.contract.subject import Subject


def trial(subject: Subject) -> Iterator[Verdict]:
    """One verdict per property, in their order."""
    measures = {name: known.measure for name, known in PROPERTIES.items()}
    untried = dict(subject.untried)
    if isinstance(subject.policy, Pattern):
        for name, known in PROPERTIES.items():
            if known.measure.__module__.endswith((".kernels", ".dropout", ".recurrence")):
                untried[name] = "a pattern has a kernel per layer; check each by itself"
    yield from try_all(subject, measures, untried)


def try_all(
    subject: Any, measures: Mapping[str, Callable[[Any], Iterable[Measure]]], untried: Mapping[str, str]
) -> Iterator[Verdict]:
    """measures: by the name of the property; what is not among them has its reason in `untried`."""
    for name, known in PROPERTIES.items():
        if name in untried:
            yield judge(known, [not_tried(untried[name])])
        else:
            yield _tried(known, measures[name], subject)


def _tried(known: Property, measure: Callable[[Any], Iterable[Measure]], subject: Any) -> Verdict:
    with torch.random.fork_rng(devices=[]):
        try:
            return judge(known, measure(subject))
        except FAILURES as error:
            # What is on trial may be anybody's code, and raising is one way to fail.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            said = next(iter(str(error).splitlines()), "")
            where = f"raised {type(error).__name__}: {said} ({Path(frame.filename).name}, line {frame.lineno})"
            return Verdict(known.name, known.sentence, False, Measure(math.inf, 0.0, where), 1)
