"""Where a loss or a gradient stopped being a finite number. Looked for only once it has happened, before any update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def first_in_forward(model: nn.Module, passes: Iterable[Callable[[], Any]]) -> str | None:
    """The name of the first module whose output is not finite while `passes` are computed again, None if all are.

    A module's hook runs after those of the modules inside it, so the innermost one is named. Attention masks are no
    outputs of modules: a −∞ in one is not found here.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            if not found and not all(bool(torch.isfinite(t).all()) for t in _floats(output)):
                found.append(name)

        return look

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(watch(name or "the model's output")).remove)
        for again in passes:
            again()
            if found:
                break
    return found[0] if found else None


def first_in_backward(model: nn.Module) -> str | None:
    """The parameter nearest the loss whose gradient is not finite: gradients are made from the last layer to the
    first, and what is not finite in one spoils all that come after it."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(torch.isfinite(_share(gradient)).all())]
    return bad[-1] if bad else None


def _share(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient that is divided among them (FSDP)."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _floats(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _floats(item)
