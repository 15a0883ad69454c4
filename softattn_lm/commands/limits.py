"""What the machine can do at most, measured: floating-point operations and bytes per second."""

from __future__ import annotations

from collections.abc import Callable

import torch

from softattn_lm.commands.comparison import seconds_of

ROUNDS = 7


def gemm_rate(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Floating-point operations per second of a product of two (size, size) matrices, 2 · size³ each; the best of some
    rounds.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), 3)


def read_bandwidth(nbytes: int) -> float:
    """Bytes per second of reading `nbytes` again and again, as a decode step reads its weights: a model that fits into
    a cache of the processor is read from there. The best of some rounds.
    """
    values = torch.ones(max(1, nbytes // 4))
    return values.numel() * 4 / _best(lambda: values.sum(), max(1, 2**27 // nbytes))


def _best(step: Callable[[], object], times: int) -> float:
    """Seconds of one call."""

    def several() -> None:
        for _ in range(times):
            step()

    several()
    return min(seconds_of(several) for _ in range(ROUNDS)) / times
