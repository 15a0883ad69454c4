"""What is on trial: a way to make a kernel, and the inputs it is tried on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility
from softattn_lm.model.block import make
from softattn_lm.model.decoder import DecoderLM

B, H, D = 2, 4, 8


@dataclass(frozen=True)
class Subject:
    """`policy` is handed the shapes it asks for, as a model would; `settings` go to the models it is put into.

    honours: what it takes part in, of `window`, `sinks`, `documents`, `bias`; the rest is refused and not tried.
    """

    name: str
    policy: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def kernel(self, seed: int = 0, **changes: Any) -> AttentionKernel:
        """A fresh kernel in eval mode, its parameters moved off their start, so that a sink of 0 takes part as well."""
        policy = self.policy if not changes else _with(self.policy, changes)
        kernel: AttentionKernel = make(
            policy, n_head=H, n_kv_head=H, head_dim=D, d_model=H * D, context=512, layer=0, bias=False
        )
        return _shake(kernel, seed).eval()

    def model(self, **settings: Any) -> DecoderLM:
        """2 layers over 11 symbols, context 16, every parameter moved off its start, in eval mode."""
        from softattn_lm.attention.projections import Separate
        from softattn_lm.attention.scale import InverseSqrt
        from softattn_lm.attention.visibility import Causal
        from softattn_lm.position.none import NoPosition

        given: dict[str, Any] = {
            "vocab_size": 11,
            "context": 16,
            "n_layer": 2,
            "n_head": H,
            "d_model": H * D,
            "attention": self.policy,
            "scale": InverseSqrt,
            "position": NoPosition,
            "mask": Causal(),
            "projections": Separate,
            **self.settings,
            **settings,
        }
        return _shake(DecoderLM(**given), seed=1).eval()

    def honours(self, option: str) -> bool:
        return option not in self.kernel().refuses


def _with(policy: Callable[..., Any], changes: dict[str, Any]) -> Callable[..., Any]:
    from functools import partial

    return partial(policy, **changes)


def _shake(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module


def inputs(
    new: int, past: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32, keys: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, keys, S, D), independent N(0, 1) in float64 and then rounded."""
    generator = torch.Generator().manual_seed(1000 * new + 10 * past + seed)
    shapes = (H, new), (keys, past + new), (keys, past + new)
    q, k, v = (torch.randn(B, heads, t, D, generator=generator, dtype=torch.float64).to(dtype) for heads, t in shapes)
    return q, k, v


def packed(total: int) -> Tensor:
    """(B, S) document numbers: three texts in the first row; two texts between padding in the second."""
    index = torch.arange(total)
    first = (index >= total // 3).long() + (index >= total // 2)
    second = torch.where(index < total // 4, -1, (index >= 2 * total // 3).long())
    second = torch.where(index >= total - total // 8, -1, second)
    return torch.stack((first, second))


def visibilities(subject: Subject, new: int, past: int) -> list[tuple[str, Visibility]]:
    """Every kind of mask that the subject honours, over T = new and S = past + new."""
    total = past + new
    found = [("causal", Visibility(new, past))]
    if subject.honours("window"):
        found += [(f"window {w}", Visibility(new, past, window=w)) for w in (1, 7)]
    if subject.honours("sinks"):
        found.append(("sinks 2 + window 5", Visibility(new, past, window=5, sinks=2)))
    if subject.honours("documents"):
        found.append(("documents", Visibility(new, past, documents=packed(total))))
    return found
