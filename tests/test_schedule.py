"""Schedules as functions of the step; that Lightning asks them once per optimizer step is tested with the training
loop.
"""

import math

import pytest

from softattn_lm.errors import UserError
from softattn_lm.training.budget import max_steps
from softattn_lm.training.schedule import (
    Constant,
    Cosine,
    LinearToZero,
    WarmupStableDecay,
    unfinished_warmup,
    warmup_steps,
)


def nanogpt(it: int, learning_rate: float, warmup: int, decay_iters: int, min_lr: float) -> float:
    """get_lr of nanoGPT's train.py, written out."""
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    if it > decay_iters:
        return min_lr
    ratio = (it - warmup) / (decay_iters - warmup)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def test_cosine_is_nanogpts_schedule():
    schedule = Cosine(warmup=100, final_fraction=0.1)
    for step in range(2000):
        assert 1e-3 * schedule.multiplier(step, 2000) == pytest.approx(nanogpt(step, 1e-3, 100, 2000, 1e-4), rel=1e-12)


@pytest.mark.parametrize("schedule", [Constant(0.1), Cosine(0.1), WarmupStableDecay(0.1, 0.5), LinearToZero(0.1)])
def test_every_schedule_warms_up_to_the_full_rate_and_no_further(schedule):
    curve = [schedule.multiplier(step, 100) for step in range(100)]
    assert curve[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert max(curve) == curve[10] == 1.0
    assert min(curve) > 0.0  # no step is wasted at a rate of zero


def test_warmup_counts_steps_from_one_on_and_is_a_fraction_below():
    assert [warmup_steps(w, 2000) for w in (0.0, 0.05, 1.0, 100)] == [0, 100, 1, 100]


def test_a_fraction_keeps_the_shape_when_the_run_is_longer():
    for schedule in (Cosine(0.1), WarmupStableDecay(0.1, 0.5), LinearToZero(0.1)):
        for t in (0.3, 0.6, 0.9):
            short, long = schedule.multiplier(round(100 * t), 100), schedule.multiplier(round(10000 * t), 10000)
            assert short == pytest.approx(long, abs=0.02)


def test_stable_decay_is_flat_then_a_straight_line():
    schedule = WarmupStableDecay(warmup=0, decay=0.4)
    curve = [schedule.multiplier(step, 10) for step in range(10)]
    assert curve == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    floor = WarmupStableDecay(warmup=0, decay=0.4, final_fraction=0.2)
    assert floor.multiplier(9, 10) == pytest.approx(0.2 + 0.8 * 0.25)
    assert WarmupStableDecay(warmup=0, decay=0.0).multiplier(9, 10) == 1.0


def test_linear_goes_to_zero_after_the_last_step():
    assert [LinearToZero(0).multiplier(step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Cosine(warmup=-1), "warmup"),
        (lambda: Cosine(warmup=math.nan), "warmup"),
        (lambda: Cosine(final_fraction=1.5), "final_fraction"),
        (lambda: WarmupStableDecay(decay=-0.1), "decay"),
    ],
)
def test_a_setting_out_of_range_is_named(make, name):
    with pytest.raises(UserError, match=f"schedule.{name}="):
        make()


@pytest.mark.parametrize("schedule", [Constant(5), Cosine(5), WarmupStableDecay(5, 0.6), LinearToZero(5)])
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_a_run_as_short_as_its_warmup_stays_within_bounds(schedule, steps):
    assert all(0.0 < schedule.multiplier(step, steps) <= 1.0 for step in range(steps))


@pytest.mark.parametrize("kind", [Constant, Cosine, WarmupStableDecay, LinearToZero])
def test_a_warmup_that_outlasts_the_run_is_said_with_both_numbers(kind):
    assert "is 20 steps and the run has 10" in (unfinished_warmup(kind(warmup=20), 10) or "")
    assert unfinished_warmup(kind(warmup=20), 20) is not None  # update 20 would be the first at the full rate
    assert unfinished_warmup(kind(warmup=20), 21) is None and unfinished_warmup(kind(warmup=0), 1) is None


def test_a_budget_below_one_step_is_refused_with_both_numbers():
    config = {"batch_size": 12, "model": {"context": 64}}
    with pytest.raises(UserError, match=r"tokens=5 is 5 tokens, less than one training step of 768 .* tokens=768 or"):
        max_steps(config | {"tokens": 5}, 10_000)
    with pytest.raises(UserError, match=r"epochs=0.01 is 100 tokens, .* 768 tokens .* epochs=0.08 or more"):
        max_steps(config | {"epochs": 0.01}, 10_000)
    assert max_steps(config | {"tokens": 768}, 10_000) == max_steps(config | {"epochs": 0.0768}, 10_000) == 1
    assert max_steps(config | {"epochs": 0.08}, 10_000) == 2
