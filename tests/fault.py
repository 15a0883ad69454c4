"""A fault, and the places where most of them are planted. See tests/mutations.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` (found exactly once) becomes `new`; then `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


ATTENTION, KERNELS = "softattn_lm/attention", "softattn_lm/attention/kernels"
MODEL, POSITION = "softattn_lm/model", "softattn_lm/position"


def contract(variant: str, name: str) -> str:
    return f"tests/test_contract.py::test_the_contract_holds[{variant}-{name}]"


def formulas(topic: str, name: str) -> str:
    return f"tests/test_formulas{topic}.py::{name}"
