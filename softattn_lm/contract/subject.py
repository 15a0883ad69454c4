"""What is on trial: a way to make a kernel, and the inputs it is tried on."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.block import make
from softattn_lm.model.decoder import DecoderLM

B, H, D = 2, 4, 8


@dataclass(frozen=True)
class Subject:
    """`policy` is handed the shapes it asks for, as a model would; it may be a Pattern over the layers.

    settings: a composition on trial, such as {"mask": Causal(5)}: every model is made of it, and what a property would
    try in its place (all masks, all positions) is left out. untried: properties that make no sense for this subject,
    each with the reason.
    """

    name: str
    policy: Callable[..., Any] | Pattern
    settings: dict[str, Any] = field(default_factory=dict)
    untried: dict[str, str] = field(default_factory=dict)

    def kernel(self, seed: int = 0, width: int = D, **changes: Any) -> AttentionKernel:
        """A fresh kernel for heads of `width`, in eval mode, its parameters moved off their start, so that a sink of 0
        takes part as well."""
        assert not isinstance(self.policy, Pattern), "a pattern has a kernel per layer"
        return _made(self.policy if not changes else partial(self.policy, **changes), seed, width)

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
            **settings,
            **self.settings,
        }
        if not _divides(given["projections"], given.get("n_kv_head", H)):
            given["n_kv_head"] = H
        return _shake(DecoderLM(**given), seed=1).eval()

    def kernels(self) -> list[AttentionKernel]:
        """The kernel, or one of each layer of a pattern."""
        policies = self.policy.layers if isinstance(self.policy, Pattern) else [self.policy]
        return [_made(policy) for policy in policies]

    def refusal(self, option: str) -> str | None:
        """Why an option is not honoured, of window, sinks, documents, bias, dropout, training; None if it is."""
        for kernel in self.kernels():
            if option in kernel.refuses:
                return kernel.refuses[option]
            if option == "training" and kernel.trains_on is not None and "cpu" not in kernel.trains_on:
                return f"its backward pass runs on {' and '.join(kernel.trains_on)} only"
        if option != "dropout" or isinstance(self.policy, Pattern):
            return None
        takes = "dropout" in inspect.signature(self.policy).parameters
        return None if takes else "its constructor takes no dropout"

    def honours(self, option: str) -> bool:
        return self.refusal(option) is None


def _made(policy: Callable[..., Any], seed: int = 0, width: int = D) -> AttentionKernel:
    shapes: dict[str, Any] = {"n_head": H, "n_kv_head": H, "head_dim": width, "d_model": H * width, "context": 2048}
    kernel: AttentionKernel = make(policy, layer=0, bias=False, **shapes)
    return _shake(kernel, seed).eval()


def _divides(projections: Callable[..., Any], n_kv_head: int) -> bool:
    """Whether these projections can have fewer key heads than query heads: shared ones cannot."""
    try:
        make(projections, n_head=H, n_kv_head=n_kv_head, head_dim=D, d_model=H * D, bias=False)
    except UserError:
        return False
    return True


def _shake(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module


def inputs(
    new: int,
    past: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    keys: int = H,
    batch: int = B,
    width: int = D,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, keys, S, D), independent N(0, 1) in float64 and then rounded."""
    generator = torch.Generator().manual_seed(1000 * new + 10 * past + seed)
    shapes = (H, new), (keys, past + new), (keys, past + new)
    q, k, v = (
        torch.randn(batch, heads, t, width, generator=generator, dtype=torch.float64).to(dtype) for heads, t in shapes
    )
    return q, k, v


def hidden(total: int, seed: int = 0, batch: int = B, width: int = D) -> Tensor:
    """x (B, S, C), the input of a block with S tokens, of which a kernel may make features: independent N(0, 1)."""
    generator = torch.Generator().manual_seed(7000 * total + seed)
    return torch.randn(batch, total, H * width, generator=generator)


def features_of(kernel: AttentionKernel, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """(B, S, C) -> (B, H, S, E) in the dtype of q, k and v, or None of a kernel that reads those only."""
    own = next((parameter.dtype for parameter in kernel.parameters()), x.dtype)
    made = kernel.features(x.to(own))
    return None if made is None else made.to(dtype)


def features(
    kernel: AttentionKernel,
    new: int,
    past: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    batch: int = B,
    width: int = D,
) -> Tensor | None:
    """(B, H, S, E) beside the q, k and v of `inputs`, or None."""
    return features_of(kernel, hidden(past + new, seed, batch, width), dtype)


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
