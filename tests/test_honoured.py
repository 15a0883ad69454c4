"""Honoured or refused: each option, by each kernel, against a table that a person wrote down."""

import pytest

from softattn_lm.commands.check_attention import variants
from softattn_lm.contract.honoured import OPTIONS, ignored, refusals
from softattn_lm.contract.subject import Subject

VARIANTS = dict(variants())
BY_A_STATE = {"window", "sink + window", "documents", "bias", "soft cap", "sink", "dropout"}
# What is refused. A kernel that is not named here honours at least what everybody does.
REFUSED: dict[str, set[str]] = {
    "formula": set(),
    "blockwise": set(),
    "auto": set(),
    "sdpa": {"soft cap", "sink"},
    "flex": {"dropout"},
    "hard": {"soft cap", "sink"},
    "topk": {"soft cap", "sink"},
    "uniform": {"bias", "soft cap", "sink"},
    "sigmoid": {"soft cap", "sink"},
    "relu": {"soft cap", "sink"},
    "differential": {"soft cap", "sink"},
    "forgetting": {"sink + window", "soft cap", "sink"},
    "linear": BY_A_STATE,
    "delta": BY_A_STATE,
}
BY_EVERYBODY = {"window", "documents", "grouped heads", "cache", "T ≠ S"}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_kernel_refuses_is_what_the_table_says(name: str) -> None:
    found = refusals(VARIANTS[name])
    assert all(found.values()), "a refusal without a reason"
    if name in REFUSED:
        assert set(found) == REFUSED[name]
    assert not BY_EVERYBODY & set(found) or REFUSED.get(name) == BY_A_STATE


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_kernel_does_not_refuse_it_acts_on(name: str) -> None:
    assert ignored(VARIANTS[name]) == []


def test_the_table_names_no_kernel_that_is_not_there() -> None:
    assert set(REFUSED) <= set(VARIANTS)


def test_an_option_that_is_taken_and_dropped_is_found() -> None:
    from softattn_lm.attention.kernels.sdpa import SDPA

    class Forgetful(SDPA):
        def __init__(self, dropout: float = 0.0, soft_cap: float | None = None) -> None:
            super().__init__(0.0)

        def forward(self, q, k, v, *, scale, visible, bias=None, features=None):
            return super().forward(q, k, v, scale=scale, visible=visible)

    assert ignored(Subject("forgetful", Forgetful)) == ["bias", "soft cap", "dropout"]
    assert len(OPTIONS) == 10
