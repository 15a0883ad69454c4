"""`benchmark loss`: the loss of a large vocabulary, forward and backward, in chunks, whole, and by torch's own
linear_cross_entropy where this torch has one: time in interleaved rounds, memory of a fresh process each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from softattn_lm.commands.comparison import Report, interleaved, peak_memory, seconds_of
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.training.loss import Chunked, Whole

CASES = [(8192, 1024), (50257, 1024)]  # vocabulary, tokens
WIDTH = 128
WAYS = ("chunks", "whole", *(("torch",) if hasattr(F, "linear_cross_entropy") else ()))


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table and writes every figure to `file`."""
    report = Report(vars(settings), file)
    report.open()
    table = Table("vocabulary, tokens", "loss", "ms (least to most)", "memory, MiB", title=f"width {WIDTH}, float32")
    report.found["loss"] = []
    # A process begins with the peak of the one that starts it, so memory comes first.
    memories = {(way, *case): _memory_of(way, *case) for case in CASES for way in WAYS}
    for vocabulary, tokens in CASES:
        steps = {way: partial(seconds_of, step(way, vocabulary, tokens)) for way in WAYS}
        for way, seconds in interleaved(steps, settings.repeats).items():
            memory = memories[way, vocabulary, tokens]
            row = {"vocabulary": vocabulary, "tokens": tokens, "way": way, "seconds": seconds, "memory": memory}
            report.found["loss"].append(row)
            spread = f"{statistics.median(seconds) * 1e3:.0f} ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
            table.add_row(f"{vocabulary:,}, {tokens:,}", way, spread, f"{memory / 2**20:.0f}")
    report.close([], table)


def step(way: str, vocabulary: int, tokens: int) -> Callable[[], Tensor]:
    """One forward and backward pass from final states; gives the loss."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, vocabulary, bias=False)
    nn.init.normal_(head.weight, std=WIDTH**-0.5, generator=generator)
    h = torch.randn(1, tokens, WIDTH, generator=generator).requires_grad_()
    y = torch.randint(vocabulary, (1, tokens), generator=generator)

    def once() -> Tensor:
        h.grad = head.weight.grad = None
        if way == "torch":
            loss: Tensor = F.linear_cross_entropy(h.flatten(0, 1), head.weight, y.flatten())
        else:
            loss = (Chunked() if way == "chunks" else Whole())(h, head, None, y)
        loss.backward()
        return loss.detach()

    return once


def _memory_of(way: str, vocabulary: int, tokens: int) -> int:
    """Bytes by which a fresh process grew in a step."""
    asked = json.dumps([way, vocabulary, tokens])
    module = "softattn_lm.commands.benchmark_loss"
    done = subprocess.run([sys.executable, "-m", module, asked], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _grow(way: str, vocabulary: int, tokens: int) -> int:
    step(way, 64, 16)()
    last = step(way, vocabulary, tokens)
    before = peak_memory()
    last()
    return peak_memory() - before


if __name__ == "__main__":
    print(_grow(*json.loads(sys.argv[1])))
