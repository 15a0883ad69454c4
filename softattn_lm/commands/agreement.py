"""Of `benchmark gpu`: whether two ways of computing the same agree, and waiting for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.comparison import Row
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.graphed import GraphedDecode

ALLOWED = "allowed"
TOLERANCE = 0.1  # of a typical entry, in bfloat16 on CUDA; 1e-4 in float32 on a CPU
STIR = 0.1  # added to weights of a small model, which start at 0.02


def agrees(what: str, found: list[Tensor], exact: list[Tensor], device: torch.device) -> Row:
    """Not a number is never allowed: the largest of tensors is one if any is."""
    apart = torch.stack([(a - b).abs().max() / _typical(b) for a, b in zip(found, exact, strict=True)])
    return _row(what, apart.max(), device)


def stirred(model: DecoderLM) -> DecoderLM:
    """Weights that a step has to honour: near a start all tokens are attended to alike, biases are 0 and gains 1, so
    that a scale eight times too large would change logits by less than what is allowed.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(STIR * torch.randn(weights.shape, generator=generator).to(weights))
    return model


def step_agrees(what: str, writer: GraphedDecode, tokens: Tensor) -> Row:
    """Logits token by token beside those of the model, which reads tokens (B, T) at once.

    A typical difference: the largest is that of a large logit, which bfloat16 rounds by more than a typical one.
    """
    with torch.inference_mode():
        writer.go_to(0)
        written = torch.stack([writer(ids).clone() for ids in tokens.unbind(1)], 1)
        exact = writer.model(tokens).float()
    return _row(what, _typical(written - exact) / _typical(exact), tokens.device)


def _typical(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _row(what: str, apart: Tensor, device: torch.device) -> Row:
    allowed = {ALLOWED: [TOLERANCE if device.type == "cuda" else 1e-4]}
    return Row(what, "of a typical entry", [apart.item()], allowed, ALLOWED, 1.0, more_is_better=False)


class LeftOut(RuntimeError):
    """A part does without something that this machine has not: no fault of ours."""


def tokens_of(shape: Shape, rows: int, device: torch.device) -> Tensor:
    return torch.randint(shape.vocabulary, (rows, shape.context), device=device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
