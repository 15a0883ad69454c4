"""Where a loss or a gradient stopped being a finite number. Looked for only once it has happened, before any update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

Passes = Iterable[Callable[[], Tensor]]  # each computes the loss of one micro-batch again


def first_in_forward(model: nn.Module, passes: Passes) -> str | None:
    """The name of the first module whose output is not finite while `passes` are computed again, None if all are.

    A module's hook runs after those of the modules inside it, so the innermost one is named. Attention masks are no
    outputs of modules: a −∞ in one is not found here.
    """
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        if not found and not all(_finite(tensor) for tensor in _floats(output)):
            found.append(name)

    with _watched(model, look), torch.no_grad():
        for loss in passes:
            loss()
    return found[0] if found else None


def first_in_backward(model: nn.Module, passes: Passes) -> str | None:
    """The name of the module to whose output a gradient comes first that is not finite: what is computed from that
    output made it. None if all are finite.

    Divided parameters (FSDP) are out of reach of `torch.autograd.grad`; there it is the last parameter in the order of
    the model whose gradient is not finite. `backward` would start DDP's own exchange once more.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(hasattr(p, "to_local") for p in parameters):
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(_share(p.grad))]
        return bad[-1] if bad else None
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        def comes(gradient: Tensor) -> None:
            if not found and not _finite(gradient):
                found.append(name)

        for tensor in _floats(output):
            if tensor.requires_grad:
                tensor.register_hook(comes)

    with _watched(model, look), torch.enable_grad():
        for loss in passes:
            torch.autograd.grad(loss(), parameters, allow_unused=True)
    return found[0] if found else None


def _watched(model: nn.Module, look: Callable[[str, Any], None]) -> ExitStack:
    """While this is entered, `look(name, output)` is called after each module."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, given, output: look(name or "the read-out", output)

    stack = ExitStack()
    for name, module in model.named_modules():
        stack.callback(module.register_forward_hook(hook(name)).remove)
    return stack


def _share(gradient: Any) -> Tensor:
    """What this rank holds of it."""
    share: Tensor = gradient.to_local()
    return share


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _floats(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _floats(item)
