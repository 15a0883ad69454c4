"""What torch.compile costs and saves, said before a run: after how many steps it has paid for itself.

The compiled code is kept below the runs' cache, so that the next run of the same model finds most of it.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from softattn_lm.errors import UserError
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.loss import batch_loss
from softattn_lm.training.metrics import Clock

TIMED = 3  # passes; the fastest counts
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's


def keep_compiled(cache: Path) -> None:
    """To be called before `Module.compile`, which chooses a folder of its own where none is set."""
    os.environ.setdefault(CACHE, str((cache / "compiled").resolve()))


class BreakEven(Callback):
    """Times forward and backward passes over random tokens, eager and compiled, which changes no weight."""

    def __init__(self, console: Console, clock: Clock, tokens_per_step: int) -> None:
        self.console, self.clock, self.tokens_per_step = console, clock, tokens_per_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        if trainer.world_size > 1:
            return  # a backward pass of one's own would begin the exchange of gradients
        with self.clock.paused():
            model, accumulate = pl_module.model, pl_module.accumulate
            shape = (self.tokens_per_step // (model.context * accumulate), model.context + 1)
            tokens = torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
            tokens = tokens.to(pl_module.device)

            def one_pass() -> float:
                began = time.perf_counter()
                with trainer.precision_plugin.forward_context():
                    loss = batch_loss(model, [tokens], pl_module.loss)
                loss.backward()
                loss.item()  # waits for the device
                seconds = time.perf_counter() - began
                model.zero_grad()
                return seconds

            try:
                with torch.compiler.set_stance("force_eager"):
                    eager = min(one_pass() for _ in range(TIMED + 1))
            except torch.OutOfMemoryError:
                model.zero_grad()
                self.console.print("uncompiled the passes of a step do not fit memory: nothing to compare with")
                return
            first = one_pass()
            compiled = min(one_pass() for _ in range(TIMED))
        said = break_even(first - compiled, accumulate * eager, accumulate * compiled, pl_module.steps)
        self.console.print(said, soft_wrap=True)


def break_even(
    compiling: float,
    eager: float,
    compiled: float,
    steps: int,
    timed: str = "the passes of a step take",
    run: str = "this run",
) -> str:
    """Seconds of compiling, and of what was timed in both ways -> a sentence. steps: of the run, by its name."""
    times = f"{1e3 * compiled:.1f} ms, and took {1e3 * eager:.1f}"
    said = f"compiling took {compiling:.0f} s; {timed} {times}"
    if compiled >= eager:
        return f"{said}: it does not pay; type training.compile=false"
    needed = math.ceil(compiling / (eager - compiled))
    return f"{said}: it pays for itself after {needed:,} steps, and {run} has {steps:,}"


def not_compiled(error: RuntimeError) -> UserError | None:
    """The line for a run whose model cannot be compiled, most often for want of a compiler; None for other errors."""
    from torch._dynamo.exc import BackendCompilerFailed  # whoever could raise it has imported all of that

    if not isinstance(error, BackendCompilerFailed):
        return None
    said = str(error).strip().partition("\n")[0]
    return UserError(
        f"training.compile=true: the model could not be compiled ({said}); install a C++ compiler, such as g++, or "
        "type training.compile=false"
    )
