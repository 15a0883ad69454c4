"""The training loss: mean nats per token, of a batch's tokens through the model to one number.

    nats_i = ln Σ_v exp u_iv − u_iy      u = z, or c · tanh(z / c) with a final cap c      z = h Wᵀ  (N, V)

For a large vocabulary the (N, V) logits are the largest tensor of a step, and are wanted three times over: as they are,
in float32, and as their gradient. `Chunked` makes them for some tokens at a time and their gradients at once, dh = dz W
and dW = dzᵀ h, so that backwards there is nothing left but to multiply by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import IGNORED

# From here on chunks are quicker than the whole. torch's linear_cross_entropy needs the time and the memory of the
# whole and has no cap: it is not used. `softattn benchmark loss` shows all three.
LARGE_VOCABULARY = 8192
# Logits of a chunk. On a CPU they should stay near its caches; a GPU wants large products.
LOGITS_ON_CPU, LOGITS_ELSEWHERE = 2**23, 2**27

# Of final states (B, T, C), head, cap and targets (B, T) -> nats, their sum or their mean over what is not ignored.
Reduction = Literal["sum", "mean"]
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Whole:
    """All logits at once."""

    def __call__(
        self, h: Tensor, head: nn.Linear, cap: float | None, targets: Tensor, reduction: Reduction = "mean"
    ) -> Tensor:
        logits = head(h)  # (B, T, V)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction=reduction,
        )


@dataclass(frozen=True)
class Chunked:
    """Those of `tokens` at a time; None: as many as suit the device. Under autocast products are rounded as they are
    there, and dW is added up in the type of the weight.
    """

    tokens: int | None = None

    def __call__(
        self, h: Tensor, head: nn.Linear, cap: float | None, targets: Tensor, reduction: Reduction = "mean"
    ) -> Tensor:
        kind = h.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
        if h.dtype == torch.float64:  # which autocast leaves alone
            dtype = h.dtype
        logits = LOGITS_ON_CPU if kind == "cpu" else LOGITS_ELSEWHERE
        tokens = self.tokens or max(1, logits // head.out_features)
        y = targets.flatten()
        nats = _ChunkedNats.apply(h.flatten(0, 1), head.weight, y, cap, tokens, dtype)
        return nats if reduction == "sum" else nats / (y != IGNORED).sum()


class _ChunkedNats(torch.autograd.Function):
    """Final states (N, C), weight (V, C), targets (N,) -> the sum of nats. Its gradients are made forwards, and
    cannot be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, y: Tensor, cap: float | None, tokens: int, dtype: torch.dtype
    ) -> Tensor:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        learns_h, learns_weight = ctx.needs_input_grad[:2]
        w = weight.to(dtype)
        total = torch.zeros((), dtype=exact, device=h.device)
        dh = torch.zeros_like(h) if learns_h else None
        dw = torch.zeros_like(weight) if learns_weight else None
        for start in range(0, len(h), tokens):
            some, target = h[start : start + tokens].to(dtype), y[start : start + tokens]
            z = (some @ w.t()).to(exact)  # (n, V)
            u = z if cap is None else cap * torch.tanh(z / cap)
            counted = target != IGNORED
            place = torch.where(counted, target, 0)[:, None]
            log_sum = torch.logsumexp(u, 1, keepdim=True)
            total = total + torch.where(counted[:, None], log_sum - u.gather(1, place), 0.0).sum()
            if not (learns_h or learns_weight):
                continue
            slope = None if cap is None else 1 - (u / cap).square()
            dz = u.sub_(log_sum).exp_()  # in place: there is room for one chunk
            dz.scatter_add_(1, place, torch.full_like(place, -1, dtype=exact))
            dz.mul_(counted[:, None])
            dz = (dz if slope is None else dz.mul_(slope)).to(dtype)
            if dh is not None:
                dh[start : start + tokens] = dz @ w
            if dw is not None and dtype == weight.dtype:
                dw.addmm_(dz.t(), some)
            elif dw is not None:
                dw.add_(dz.t() @ some)
        ctx.save_for_backward(*(made for made in (dh, dw) if made is not None))
        ctx.learns = (learns_h, learns_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made = [saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors]
        learns_h, learns_weight = ctx.learns
        dh = made[0] if learns_h else None
        return dh, made[-1] if learns_weight else None, None, None, None, None


def make_loss(vocab_size: int, chunk: int | None = None) -> Loss:
    """chunk: tokens whose logits are made at once; 0: those of all; None: as the vocabulary and the device are.

    Raises UserError for less than none.
    """
    if chunk is not None and chunk < 0:
        raise UserError(
            f"training.loss_chunk={chunk} must be 0 or more; type training.loss_chunk=null to have it chosen"
        )
    if chunk == 0 or (chunk is None and vocab_size < LARGE_VOCABULARY):
        return Whole()
    return Chunked(chunk)


def batch_loss(model: Callable[..., Any], batch: list[Tensor], loss: Loss) -> Tensor:
    """[tokens (B, T+1) int64, perhaps documents (B, T)] -> mean nats per token; of a task [x, y (B, T), share ()] ->
    nats of its answers over the share, see `TaskBatches`.

    The model computes it: that is where divided parameters are whole (FSDP), and what is compiled.
    """
    if len(batch) == 3:
        x, y, share = batch
        nats: Tensor = model(x, targets=y, loss=partial(loss, reduction="sum")) / share
        return nats
    tokens, *documents = batch
    packed = documents[0] if documents else None
    mean: Tensor = model(tokens[:, :-1], documents=packed, targets=tokens[:, 1:], loss=loss)
    return mean
