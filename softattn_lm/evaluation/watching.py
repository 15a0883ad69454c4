"""Looking over the shoulder of a model: what each kernel is handed in a forward pass, by hooks that last no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM


@dataclass(frozen=True)
class Seen:
    """What a kernel was handed: q (B, H, T, D), k (B, H, S, D) with groups repeated, and the rest as it came."""

    kernel: AttentionKernel
    q: Tensor
    k: Tensor
    scale: float | Tensor
    visible: Visibility
    bias: Bias | None
    features: Tensor | None

    def weights(self) -> Tensor:
        """(B, H, T, S) float64."""
        return precise(
            self.kernel.weights(
                self.q, self.k, scale=self.scale, visible=self.visible, bias=self.bias, features=self.features
            )
        )

    def logits(self) -> Tensor:
        """(B, H, T, S) float64: scale · q kᵀ, hidden keys included."""
        return precise(self.scale * (self.q @ self.k.transpose(-2, -1)))

    def readable(self) -> Tensor:
        """(T, S) or (B, 1, T, S) bool where `precise` puts things."""
        return self.visible.dense().to(precise(self.q[:0]).device)


def precise(x: Tensor) -> Tensor:
    """In float64, on the CPU where a device has none (mps)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


@contextmanager
def watched(model: DecoderLM, see: Callable[[int, Seen], None]) -> Iterator[None]:
    """Calls `see(layer, seen)` after each call of a kernel. Hooks: nothing of the model itself knows of it."""

    def hook(layer: int) -> Callable[..., None]:
        def after(kernel: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            q, k, _ = args
            wide = expand_groups(k, q.shape[1])
            see(layer, Seen(kernel, q, wide, given["scale"], given["visible"], given["bias"], given["features"]))

        return after

    handles = [
        block.attention.kernel.register_forward_hook(hook(layer), with_kwargs=True)
        for layer, block in enumerate(model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: DecoderLM) -> Iterator[None]:
    """Eval mode without gradients; afterwards every part is in the mode it had."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
