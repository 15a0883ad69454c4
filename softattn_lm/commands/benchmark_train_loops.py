"""Of `benchmark train`: bare loops of both sides beside each other, Llama-style and through torch.compile, whose first
step tells what compiling costs. `steps` are timed in each round.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from softattn_lm.commands import bare_training, peers
from softattn_lm.commands.bare_training import BareLoop, Shape
from softattn_lm.commands.comparison import Row, interleaved, seconds_of
from softattn_lm.training.break_even import CACHE, break_even

LONG, LONG_RUN = 2000, "experiment=nanogpt_cpu"  # steps of the run that compiling is held against


def compare_llama(shape: Shape, steps: int, repeats: int) -> Row:
    """Rotary positions, RMSNorm, SwiGLU, no biases, a tied head."""
    loops = {
        "ours": bare_training.ours(shape, build=bare_training.llama_style),
        "transformers": peers.of_transformers(shape, build=peers.transformers_llama),
        **peers.of_others(shape, llama=True),
    }
    found = interleaved({name: partial(rate_of_loop, loop, shape, steps) for name, loop in loops.items()}, repeats)
    return Row(f"{shape}, float32, bare loop, Llama-style", "tokens/s", found.pop("ours"), found, "transformers")


def compare_compiled(shape: Shape, steps: int, scratch: Path, repeats: int) -> tuple[Row, str]:
    """Bare loops of both sides through torch.compile, nothing of which is cached before, and when ours has paid. Raises
    RuntimeError where nothing can be compiled.
    """
    eager, ours, peer = bare_training.ours(shape), bare_training.ours(shape), peers.of_transformers(shape)
    loops = {"bare loop": eager, "compiled": ours, "transformers, compiled": peer}
    with compiled_in(scratch / "compiled"):
        for loop in (ours, peer):
            loop.model.compile()
        first = seconds_of(ours.step)
        found = interleaved({name: partial(rate_of_loop, loop, shape, steps) for name, loop in loops.items()}, repeats)
    compiled = found.pop("compiled")
    before, after = (shape.tokens / statistics.median(rates) for rates in (found["bare loop"], compiled))
    return (
        Row(f"{shape}, float32, bare loop compiled", "tokens/s", compiled, found, "transformers, compiled"),
        break_even(first - after, before, after, LONG, "an optimizer step takes", LONG_RUN),
    )


@contextmanager
def compiled_in(folder: Path) -> Iterator[None]:
    """What torch compiles is kept in `folder`, and afterwards where it was kept before."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = str(folder)
    try:
        yield
    finally:
        del os.environ[CACHE]
        if before is not None:
            os.environ[CACHE] = before


def rate_of_loop(loop: BareLoop, shape: Shape, steps: int) -> float:
    """Tokens per second."""

    def several() -> None:
        for _ in range(steps):
            loss = loop.step()
        float(loss)

    loop.step()
    return steps * shape.tokens / seconds_of(several)
