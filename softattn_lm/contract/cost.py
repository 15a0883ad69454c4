"""What an attention costs: forward + backward of one sequence, beside `formula` and `sdpa`, in one process.

Every case runs once per round and is compared within the round, so that what slows the machine slows all of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.subject import Subject
from softattn_lm.model.block import make

LENGTHS = (128, 512, 1024)
HEADS, HEAD_DIM, ROUNDS = 4, 32, 5

Step = Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """seconds: median over rounds; bytes: peak of what torch allocated; against: ratios (time, memory) by baseline."""

    length: int
    seconds: float
    bytes: int
    against: dict[str, tuple[float, float]]


def costs(mine: Callable[[int], Step], baselines: Mapping[str, Callable[[int], Step]]) -> list[Cost]:
    """One row per length; each function gives the step to measure at a length."""
    rows = []
    for length in LENGTHS:
        steps = {"mine": mine(length)} | {name: step(length) for name, step in baselines.items()}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(ROUNDS + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if number:  # the first round warms up
                    taken[name].append(time.perf_counter() - start)
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
        against = {}
        for name in baselines:
            ratios = [a / b for a, b in zip(taken["mine"], taken[name], strict=True)]
            against[name] = statistics.median(ratios), peaks["mine"] / peaks[name]
        rows.append(Cost(length, statistics.median(taken["mine"]), peaks["mine"], against))
    return rows


def kernel_costs(subject: Subject) -> list[Cost]:
    """Of the kernel on random inputs under its mask; forward only if it has no backward pass here."""
    mask = subject.settings.get("mask")
    trains = subject.refusal("training") is None

    def step_of(policy: Callable[..., Any]) -> Callable[[int], Step]:
        def at(length: int) -> Step:
            sizes = {"n_head": HEADS, "n_kv_head": HEADS, "head_dim": HEAD_DIM, "d_model": HEADS * HEAD_DIM}
            kernel = make(policy, layer=0, context=length, bias=False, **sizes)
            visible = Visibility(length) if mask is None else mask.visibility(Visibility(length), length)
            generator = torch.Generator().manual_seed(0)
            q, k, v, dy = (torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(4))
            x = torch.randn(1, length, HEADS * HEAD_DIM, generator=generator)
            leaves = [x.requires_grad_(trains) for x in (q, k, v)]

            def step() -> None:
                y = kernel(q, k, v, scale=HEAD_DIM**-0.5, visible=visible, features=kernel.features(x))
                if trains:
                    torch.autograd.grad(y, leaves, dy, allow_unused=True)

            return step

        return at

    assert callable(subject.policy)
    return costs(step_of(subject.policy), {"formula": step_of(Formula), "sdpa": step_of(SDPA)})


def peak_bytes(step: Step) -> int:
    """The most that torch held at once on the CPU, above what it held before."""
    # Read when the profiler starts for the first time: it would speak of itself on the screen.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return max(most, 1)
