"""Training as plainly as torch can say it, of our model or of another in its shape (see peers.py): batches made before,
fused AdamW, gradients clipped, nothing logged or saved. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.projections import Separate
from softattn_lm.attention.scale import InverseSqrt
from softattn_lm.attention.visibility import Causal
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.position.base import Position
from softattn_lm.position.learned import Learned
from softattn_lm.position.rotary import Rotary
from softattn_lm.training.optim import AdamW

RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0  # nanoGPT's
BATCHES = 16  # that are made before and used in turn


@dataclass(frozen=True)
class Shape:
    """Of a model; heads of 32 at width 128 and of 64 above, as nanoGPT's two small models and GPT-2 itself."""

    layers: int
    width: int
    context: int
    batch: int
    vocabulary: int = 65

    @property
    def heads(self) -> int:
        return 4 if self.width == 128 else self.width // 64

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, context {self.context}, batch {self.batch}"


def gpt2_style(shape: Shape, position: type[Position] = Learned, window: int | None = None) -> DecoderLM:
    """Ours in this shape: LayerNorm, biases, tanh GELU, tied head; learned positions, unless others are asked for."""
    return DecoderLM(
        vocab_size=shape.vocabulary,
        context=shape.context,
        n_layer=shape.layers,
        n_head=shape.heads,
        d_model=shape.width,
        attention=SDPA,
        scale=InverseSqrt,
        position=position,
        mask=Causal(window),
        projections=Separate,
        norm="layer",
        mlp="gelu_tanh",
        bias=True,
        tie_head=True,
        init="gpt2",
    )


def llama_style(shape: Shape) -> DecoderLM:
    """Ours in this shape: RMSNorm, rotary positions, SwiGLU, no biases, tied head."""
    return DecoderLM(
        vocab_size=shape.vocabulary,
        context=shape.context,
        n_layer=shape.layers,
        n_head=shape.heads,
        d_model=shape.width,
        attention=SDPA,
        scale=InverseSqrt,
        position=Rotary,
        mask=Causal(),
        projections=Separate,
        norm="rms",
        mlp="swiglu",
        bias=False,
        tie_head=True,
        init="gpt2",
    )


class BareLoop:
    """`model` and its optimizer, trained on random tokens on the CPU. logits: of a batch (B, T) -> (B, T, V)."""

    def __init__(
        self,
        model: nn.Module,
        logits: Callable[[Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        shape: Shape,
        *,
        bfloat16: bool = False,
    ) -> None:
        self.model, self.logits, self.optimizer, self.bfloat16 = model, logits, optimizer, bfloat16
        generator = torch.Generator().manual_seed(0)
        self.batches = torch.randint(shape.vocabulary, (BATCHES, shape.batch, shape.context + 1), generator=generator)
        self.done = 0

    def step(self) -> Tensor:
        """One optimizer step. Returns the loss."""
        batch = self.batches[self.done % BATCHES]
        self.done += 1
        with torch.autocast("cpu", torch.bfloat16) if self.bfloat16 else nullcontext():
            logits = self.logits(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def ours(shape: Shape, bfloat16: bool = False, build: Callable[[Shape], DecoderLM] = gpt2_style) -> BareLoop:
    model = build(shape)
    optimizer = AdamW(model.parameter_roles(), lr=RATE, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY)
    return BareLoop(model, model, optimizer, shape, bfloat16=bfloat16)


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
