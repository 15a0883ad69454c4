"""The same A as `formula` by torch's FlexAttention: blocks that nobody reads are skipped, nothing of size T² is kept.

For training on CUDA, where it is compiled. On a CPU it has no backward pass and runs uncompiled, with the (T, S) scores
in memory, so it serves for inference there; `blockwise` trains.

Dong et al. 2024, arXiv:2412.05496. A sink of score b is what the log-sum-exp of a row makes of it: y · σ(lse − b).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from softattn_lm.attention.bias import Bias, DistanceBias
from softattn_lm.attention.kernels.formula import Sink, SoftmaxKernel
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # torch < 2.9 says return_lse instead
    _LSE: dict[str, Any] = {"return_lse": True}
else:
    _LSE = {"return_aux": AuxRequest(lse=True)}

TRAINS_ON = ("cuda",)

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex(SoftmaxKernel):
    """Raises UserError for dropout, and for a backward pass on a device other than CUDA."""

    grouped = True
    refuses: ClassVar[dict[str, str]] = {
        "dropout": "FlexAttention drops no weights; type model.dropout=0 or attention=blockwise"
    }
    trains_on: ClassVar[tuple[str, ...] | None] = TRAINS_ON

    def __init__(self, n_head: int, dropout: float = 0.0, soft_cap: float | None = None, sink: Sink = "none") -> None:
        super().__init__(n_head, dropout, soft_cap, sink)
        if dropout:
            raise UserError(f"attention=flex with dropout={dropout}: {self.refuses['dropout']}")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        return flex_softmax(q, k, v, scale, visible, bias, self.soft_cap, self.sink)


def flex_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor,
    visible: Visibility,
    bias: Bias | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """(B, H, T, D), (B, G, S, D), (B, G, S, D) -> (B, H, T, D); sink: (H,) scores."""
    if isinstance(scale, Tensor):
        q, scale = (q * scale).to(q.dtype), 1.0
    trains = q.device.type in TRAINS_ON
    y, aux = _call(
        *((q, k, v) if trains else (q.detach(), k.detach(), v.detach())),
        score_mod=_score_mod(soft_cap, bias, visible),
        block_mask=None if visible.reads_all else block_mask(visible),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **_LSE,
    )
    if sink is not None:
        lse: Tensor = aux if isinstance(aux, Tensor) else aux.lse  # (B, H, T)
        y = (y * torch.sigmoid(lse - sink[:, None])[..., None]).to(y.dtype)
    if not trains and torch.is_grad_enabled():
        y = _WithoutBackward.apply(y.detach(), q, k, v)
    return y


class _WithoutBackward(torch.autograd.Function):
    """Says in one sentence, and only to those who ask for gradients, that there are none."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *inputs: Tensor) -> Tensor:
        ctx.device = y.device.type
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise UserError(
            f"attention=flex cannot train on {ctx.device}: FlexAttention has no backward pass there; "
            "type attention=blockwise"
        )


def _call(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    if q.device.type == "cuda":
        return _compiled()(q, k, v, **given)
    # Compiling for a CPU takes half a minute per shape, and a cache has a new shape for each token.
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q, k, v, **given)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _score_mod(soft_cap: float | None, bias: Bias | None, visible: Visibility) -> ScoreMod | None:
    if soft_cap is None and bias is None:
        return None
    add = None if bias is None else _added(bias, visible)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        return score if add is None else add(score, b, h, i, j)

    return score_mod


def _added(bias: Bias, visible: Visibility) -> ScoreMod:
    if isinstance(bias, DistanceBias):
        slopes, position, past = bias.slopes, visible.key_positions, visible.past

        def add_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * torch.clamp(position[past + i] - position[j], min=0)

        return add_distance
    values = bias.tile()  # (H, T, S): only the bias knows how to make it, so it is made

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + values[h, i, j]

    return add


def _mask_mod(visible: Visibility) -> MaskMod:
    """What `Visibility.tile` says, for one query and one key."""
    position, past, window, sinks = visible.key_positions, visible.past, visible.window, visible.sinks
    documents, places = visible.documents, visible.places
    counted = position if places is None else places

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = position[past + i] - position[j]
        readable = distance >= 0
        if window is not None:
            near = distance < window
            if sinks:
                near = near | ((counted[j] if documents is None else counted[b, j]) < sinks)
            readable = readable & near
        if documents is not None:
            readable = readable & (documents[b, past + i] == documents[b, j]) & (documents[b, j] >= 0)
        return readable

    return mask_mod


_OF_DOCUMENTS: WeakKeyDictionary[Visibility, BlockMask] = WeakKeyDictionary()


@torch.compiler.disable
def block_mask(visible: Visibility) -> BlockMask:
    """Made once per shape and window, and once per batch of documents, whatever the number of layers."""
    if visible.documents is None:
        device = torch.device(visible.device)
        # Without sinks only distances count, and those are the same wherever the text stands.
        start = visible.start if visible.sinks else None
        return _of_shape(visible.new, visible.past, visible.window, visible.sinks, start, device)
    if visible not in _OF_DOCUMENTS:
        _OF_DOCUMENTS[visible] = _make(visible, len(visible.documents))
    return _OF_DOCUMENTS[visible]


@functools.lru_cache(maxsize=32)
def _of_shape(
    new: int, past: int, window: int | None, sinks: int, start: int | None, device: torch.device
) -> BlockMask:
    return _make(Visibility(new, past, window, sinks, start, device=device), None)


def _make(visible: Visibility, n_rows: int | None) -> BlockMask:
    device = torch.device(visible.device) if visible.documents is None else visible.documents.device
    return create_block_mask(_mask_mod(visible), n_rows, None, visible.new, visible.total, device=device)
