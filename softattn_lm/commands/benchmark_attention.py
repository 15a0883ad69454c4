"""`benchmark attention`: forward + backward of `blockwise` on a CPU beside `formula` and torch's fused kernel.

Times are taken in one process, every case once per round, and compared within the round, so that what slows the machine
for a while slows both sides. Memory is taken in a fresh process per case, from the operating system.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.blockwise import Blockwise
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.visibility import Visibility
from softattn_lm.commands.comparison import Report, interleaved, peak_memory, seconds_of
from softattn_lm.config.settings import BenchmarkSettings

# Name -> kernel, whether there is a window, longest T: beyond, a (T, T) matrix takes minutes or all of the memory.
CASES: dict[str, tuple[Callable[[int], AttentionKernel], bool, int]] = {
    "formula": (lambda heads: Formula(heads), False, 4096),
    "sdpa": (lambda heads: SDPA(), False, 16384),
    "sdpa, window as explicit mask": (lambda heads: SDPA(), True, 8192),
    "blockwise": (lambda heads: Blockwise(heads), False, 2**20),
    "blockwise, window": (lambda heads: Blockwise(heads), True, 2**20),
    "blockwise, soft cap": (lambda heads: Blockwise(heads, soft_cap=30.0), False, 2**20),
    "blockwise, sink": (lambda heads: Blockwise(heads, sink="learned"), False, 2**20),
}
LONGEST_TIMED = 8192
# (what, measure, case, T, against, its T, limit, whether the figure must stay below): figure = case / against.
TARGETS = [
    ("memory, 16384 keys against 2048", "memory", "blockwise", 16384, "blockwise", 2048, 8.0, True),
    ("memory against formula", "memory", "blockwise", 4096, "formula", 4096, 0.1, True),
    ("causal against sdpa", "time", "blockwise", 4096, "sdpa", 4096, 1.7, True),
    (
        "explicit mask against window",
        "time",
        "sdpa, window as explicit mask",
        4096,
        "blockwise, window",
        4096,
        6.0,
        False,
    ),
    (
        "explicit mask against window",
        "time",
        "sdpa, window as explicit mask",
        8192,
        "blockwise, window",
        8192,
        12.0,
        False,
    ),
    ("soft cap against plain", "time", "blockwise, soft cap", 4096, "blockwise", 4096, 1.4, True),
    ("sink against plain", "time", "blockwise, sink", 4096, "blockwise", 4096, 1.4, True),
]


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table, another if lengths are those of a target, and writes every figure to `file`."""
    report = Report(vars(settings), file)
    report.open()
    found = report.found
    found["memory"] = {
        name: {str(t): _memory_of(name, t, settings) for t in settings.lengths if t <= longest}
        for name, (_, _, longest) in CASES.items()
    }
    found["time"] = {name: {} for name in CASES}
    for length in settings.lengths:
        if length <= LONGEST_TIMED:
            for name, seconds in _times(length, settings).items():
                found["time"][name][str(length)] = seconds
    found["targets"] = [figures for target in TARGETS if (figures := _reached(target, found)) is not None]
    verdicts = [_verdicts(found["targets"])] if found["targets"] else []
    report.close([], _figures(found, settings.lengths), *verdicts)


def _step(name: str, length: int, settings: BenchmarkSettings) -> Callable[[], None]:
    """One forward and backward pass of a case over a batch of one sequence in float32."""
    make, windowed, _ = CASES[name]
    kernel = make(settings.heads)
    visible = Visibility(length, window=settings.window if windowed else None)
    generator = torch.Generator().manual_seed(0)
    shape = (1, settings.heads, length, settings.head_dim)
    q, k, v, dy = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        y = kernel(q, k, v, scale=settings.head_dim**-0.5, visible=visible)
        torch.autograd.grad(y, leaves, dy)

    return step


def _times(length: int, settings: BenchmarkSettings) -> dict[str, list[float]]:
    """Seconds of each round."""
    steps = {name: _step(name, length, settings) for name, (_, _, longest) in CASES.items() if length <= longest}
    return interleaved({name: partial(seconds_of, step) for name, step in steps.items()}, settings.repeats)


def _memory_of(name: str, length: int, settings: BenchmarkSettings) -> int:
    """Bytes by which a fresh process grew."""
    asked = json.dumps({"name": name, "length": length, **vars(settings)})
    module = "softattn_lm.commands.benchmark_attention"
    done = subprocess.run([sys.executable, "-m", module, asked], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _grow(asked: dict[str, Any]) -> int:
    """The child's part: peak during a step, above what the process held with its inputs made and torch warmed up."""
    name, length = asked.pop("name"), asked.pop("length")
    settings = BenchmarkSettings(**asked)
    _step(name, 64, settings)()
    step = _step(name, length, settings)
    before = peak_memory()
    step()
    return peak_memory() - before


def _reached(target: tuple[str, str, str, int, str, int, float, bool], found: dict[str, Any]) -> dict[str, Any] | None:
    """A target beside what was measured, or None if its lengths were not."""
    what, measure, case, length, against, its_length, limit, below = target
    above, under = found[measure][case].get(str(length)), found[measure][against].get(str(its_length))
    if above is None or under is None:
        return None
    ratios = [above / under] if measure == "memory" else [a / b for a, b in zip(above, under, strict=True)]
    reached = statistics.median(ratios)
    return {
        "what": what,
        "length": length,
        "target": limit,
        "at_most": below,
        "reached": reached,
        "least": min(ratios),
        "most": max(ratios),
        "ok": reached <= limit if below else reached >= limit,
    }


def _figures(found: dict[str, Any], lengths: list[int]) -> Table:
    table = Table(
        "forward + backward", *[f"T={length}" for length in lengths], title="seconds (least to most); peak memory"
    )
    for name in CASES:
        cells = []
        for length in map(str, lengths):
            seconds, memory = found["time"][name].get(length), found["memory"][name].get(length)
            lines = [f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"] if seconds else []
            cells.append("\n".join([*lines, *([f"{memory / 2**20:.0f} MiB"] if memory is not None else [])]) or "-")
        table.add_row(name, *cells)
    return table


def _verdicts(targets: list[dict[str, Any]]) -> Table:
    table = Table("ratio", "T", "target", "reached", "least to most", "")
    for row in targets:
        sign = "at most" if row["at_most"] else "at least"
        spread = f"{row['least']:.2f} to {row['most']:.2f}"
        verdict = "yes" if row["ok"] else "NO"
        table.add_row(
            row["what"], str(row["length"]), f"{sign} {row['target']:g}", f"{row['reached']:.2f}", spread, verdict
        )
    return table


if __name__ == "__main__":
    print(_grow(json.loads(sys.argv[1])))
