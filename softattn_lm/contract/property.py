"""A property is a sentence and a function that measures how far a subject is from it; a verdict is what came out."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from softattn_lm.contract.subject import Subject


@dataclass(frozen=True)
class Measure:
    """One comparison: how large the error was, how large it may be, and where it was seen."""

    error: float
    allowed: float
    where: str
    tried: bool = True


def not_tried(reason: str) -> Measure:
    """In the place of a measurement that makes no sense for a subject: shown with its reason, never left out."""
    return Measure(0.0, 0.0, reason, tried=False)


@dataclass(frozen=True)
class Verdict:
    """ok, and the worst measure: the one that exceeds what is allowed most, or comes nearest to it."""

    name: str
    sentence: str
    ok: bool
    worst: Measure
    measures: int

    @property
    def tried(self) -> bool:
        return self.worst.tried


Function = Callable[[Subject], Iterable[Measure]]


@dataclass(frozen=True)
class Property:
    name: str
    sentence: str
    measure: Function


PROPERTIES: dict[str, Property] = {}


def holds(sentence: str) -> Callable[[Function], Function]:
    """Registers a function, under its own name, as a property that the sentence states."""

    def register(function: Function) -> Function:
        PROPERTIES[function.__name__] = Property(function.__name__, sentence, function)
        return function

    return register


def run_property(name: str, subject: Subject) -> Verdict:
    return judge(PROPERTIES[name], PROPERTIES[name].measure(subject))


def judge(known: Property, measures: Iterable[Measure]) -> Verdict:
    """Measures everything and keeps the worst. A property that measured nothing does not hold."""
    worst, count, ok = Measure(0.0, 0.0, "nothing was measured"), 0, True
    for measure in measures:
        bad = not measure.error <= measure.allowed
        # What was measured tells more than what was not.
        first = not count or (measure.tried and not worst.tried)
        if first or (bad and ok) or ((bad or ok) and measure.tried and _severity(measure) > _severity(worst)):
            worst = measure
        count, ok = count + 1, ok and not bad
    return Verdict(known.name, known.sentence, ok and count > 0, worst, count)


def _severity(measure: Measure) -> float:
    if math.isnan(measure.error):
        return math.inf
    return measure.error / measure.allowed if measure.allowed else measure.error


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; infinite where one is not a number. 0 for empty tensors."""
    if actual.shape != expected.shape:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    gap = (actual.double() - expected.double()).abs().max().item()
    return math.inf if math.isnan(gap) else gap


def same_bits(actual: Tensor, expected: Tensor, where: str) -> Measure:
    """Allows no difference at all."""
    return Measure(difference(actual, expected), 0.0, where)


def close(actual: Tensor, expected: Tensor, tolerance: float, where: str) -> Measure:
    """Absolute for small numbers, relative for large ones."""
    size = expected.double().abs().max().item() if expected.numel() else 1.0
    return Measure(difference(actual, expected), tolerance * max(1.0, size), where)


def differs(first: Tensor, second: Tensor, where: str) -> Measure:
    """The opposite: fails if two results that must not be equal are."""
    return Measure(0.0 if not torch.equal(first, second) else 1.0, 0.5, where)
