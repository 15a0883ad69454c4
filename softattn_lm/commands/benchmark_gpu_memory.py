"""Of `benchmark gpu`: what saves memory, and what it costs in time; eagerly, so that the parts are seen by themselves.

loss in chunks      beside all logits at once
layers twice        beside keeping everything that the backward pass reads (training.checkpoint_activations=block)
pinned batch        copied to the device beside one in ordinary memory
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.comparison import Row, interleaved, seconds_of
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.training.loss import Chunked, Loss, Whole

BATCHES = 100  # copied, to time one
WAYS: dict[str, tuple[Loss, bool]] = {
    "whole": (Whole(), False),
    "chunks": (Chunked(), False),
    "chunks, layers twice": (Chunked(), True),
}


def memory(model: DecoderLM, shape: Shape, device: torch.device, repeats: int) -> list[Row]:
    """Seconds of a forward and backward pass and, on CUDA, the bytes it needs beyond weights and gradients."""
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), device=device)
    steps = {name: partial(step, model, tokens, *way) for name, way in WAYS.items()}
    seconds = interleaved({name: partial(timed, once, device) for name, once in steps.items()}, repeats)
    rows = [compared("a pass", "s", seconds, "chunks", "whole")]
    rows.append(compared("a pass", "s", seconds, "chunks, layers twice", "chunks"))
    if device.type == "cuda":
        peaks = {name: [peak(once, device)] for name, once in steps.items()}
        rows.append(compared("memory of a pass", "bytes", peaks, "chunks", "whole"))
        rows.append(compared("memory of a pass", "bytes", peaks, "chunks, layers twice", "chunks"))
        rows.append(pinned(tokens.cpu(), device, repeats))
    return rows


def step(model: DecoderLM, tokens: Tensor, loss: Loss, twice: bool) -> None:
    model.recomputes = twice
    with torch.autocast(tokens.device.type, torch.bfloat16):
        made = model(tokens[:, :-1], targets=tokens[:, 1:], loss=loss)
    made.backward()


def timed(once: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done it."""

    def waited() -> None:
        once()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return seconds_of(waited)


def peak(once: Callable[[], object], device: torch.device) -> float:
    """Bytes beyond those held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    once()
    return torch.cuda.max_memory_allocated(device) - before


def pinned(tokens: Tensor, device: torch.device, repeats: int) -> Row:
    """Seconds to hand a batch over: the process goes on while a pinned one is copied."""
    sources = {"pinned": (tokens.pin_memory(), True), "ordinary": (tokens, False)}

    def copy(source: Tensor, asynchronous: bool) -> float:
        torch.cuda.synchronize()
        handed = seconds_of(lambda: [source.to(device, non_blocking=asynchronous) for _ in range(BATCHES)])
        return handed / BATCHES

    seconds = interleaved({name: partial(copy, *source) for name, source in sources.items()}, repeats)
    return compared("handing over a batch", "s", seconds, "pinned", "ordinary")


def compared(what: str, unit: str, found: dict[str, list[float]], ours: str, other: str) -> Row:
    return Row(f"{what}, {ours}", unit, found[ours], {other: found[other]}, other, more_is_better=False)
