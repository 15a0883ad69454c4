"""The scores that real blocks make: at the start of a model and in a trained one.

Scores are scale · q·k, before soft cap, bias and gates, as in telemetry.py: for differential attention of whole vectors
and not of either half, for the delta rule of keys whose length is not yet taken out. Weights are those of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.projections import IdentityV, Separate, SharedKV
from softattn_lm.attention.scale import Constant
from softattn_lm.attention.visibility import Causal
from softattn_lm.evaluation.scale_law import block_std
from softattn_lm.evaluation.watching import Seen, evaluating, precise, watched
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.parameters import InitKind
from softattn_lm.position.none import NoPosition

if TYPE_CHECKING:
    from softattn_lm.model.block import Block

# (components of q, keys of the last query) -> name of a scale, its factor.
Others = Callable[[int, int], Mapping[str, float]]

LAYERS, HEADS, TEXTS, SYMBOLS = 2, 2, 32, 512
CHECKPOINT_WINDOWS = 64
CHECKPOINT_TOKENS = 4096  # in one forward pass, which forms (T, T) weights


def scores_at_start(d_k: int, d_model: int, n_keys: int, init: InitKind, seed: int) -> Tensor:
    """(R, N) q·k without a scale of an untrained model with layer norm, on texts of N random tokens.

    W_q and W_k start as `init`, everything else at unit variance. Every query is set against all keys of its text: what
    is asked is how large scores are, not what may be read.
    """
    model = DecoderLM(
        vocab_size=SYMBOLS,
        context=n_keys,
        n_layer=LAYERS,
        n_head=HEADS,
        d_model=d_model,
        head_dim=d_k,
        attention=SDPA,
        scale=Constant,
        position=NoPosition,
        mask=Causal(),
        projections=Separate,
        norm="layer",
        init_q=init,
        init_k=init,
        seed=seed,
    )
    found: list[Tensor] = []
    texts = torch.from_numpy(np.random.default_rng(seed).integers(SYMBOLS, size=(TEXTS, n_keys)))
    with evaluating(model), watched(model, lambda layer, seen: found.append(seen.logits().flatten(0, 2))):
        model(texts)
    return torch.cat(found)


@dataclass(frozen=True)
class LayerScores:
    """Of one layer, the last query of each window against the N keys that it reads.

    d_k: components of q. dots (B, H, N): q·k; scale (H or 1, 1); weights (B, H, N): those of the kernel. kernel: its
    name; rows_sum_to, reads_scores: what it says of itself. others: name of another scale -> its factor and the weights
    that the kernel gives the same q, k, bias and features under it; {} if it reads no scores. bound: of |scale · q·k|
    with QK norm. law: standard deviation of scale · q·k if W_q, W_k and the input were independent; None where q and k
    are normed or have no such matrices.
    """

    d_k: int
    dots: Tensor
    scale: Tensor
    weights: Tensor
    kernel: str
    rows_sum_to: str
    reads_scores: bool
    others: dict[str, tuple[float, Tensor]]
    law: float | None
    bound: float | None


def scores_of_model(model: DecoderLM, tokens: np.ndarray, others: Others = lambda d_k, n_keys: {}) -> list[LayerScores]:
    """One entry per layer, from the first windows of `tokens` (n,), which has a token at least.

    others: the scales to set beside the model's own; asked once per width and count of keys.
    """
    length = min(model.context, len(tokens))
    windows = max(1, min(CHECKPOINT_WINDOWS, len(tokens) // length))
    text = torch.from_numpy(tokens[: windows * length].astype(np.int64).reshape(windows, length))
    parts: list[list[LayerScores]] = [[] for _ in model.layers]
    squares: dict[int, float] = {}
    once = cache(others)

    def see(layer: int, seen: Seen) -> None:
        parts[layer].append(_last_query(model.layers[layer], seen, squares[layer], once))

    handles = [
        block.attention.register_forward_pre_hook(
            lambda _, args, layer=layer: squares.__setitem__(layer, args[0].square().mean().item())
        )
        for layer, block in enumerate(model.layers)
    ]
    try:
        with evaluating(model), watched(model, see):
            for batch in text.split(max(1, CHECKPOINT_TOKENS // length)):
                model(batch.to(model.embed.weight.device))
    finally:
        for handle in handles:
            handle.remove()
    return [_together(of_layer) for of_layer in parts]


def _last_query(block: Block, seen: Seen, mean_square: float, others: Others) -> LayerScores:
    keys = seen.readable()[-1]  # (S,) as one text has one mask
    dots = precise(seen.q[:, :, -1:] @ seen.k.transpose(-2, -1))[:, :, 0, keys]
    factor = seen.scale if isinstance(seen.scale, Tensor) else torch.tensor(seen.scale).expand(1, 1, 1)
    scale = precise(factor)[:, -1]  # (H, 1)
    law, kernel = _law(block, mean_square), seen.kernel
    factors = others(seen.q.shape[-1], int(keys.sum())) if kernel.reads_scores else {}
    under = {name: (other, replace(seen, scale=other).weights()[:, :, -1, keys]) for name, other in factors.items()}
    normed = isinstance(block.attention.q_norm, nn.RMSNorm) and not block.attention.q_norm.elementwise_affine
    return LayerScores(
        seen.q.shape[-1],
        dots,
        scale,
        seen.weights()[:, :, -1, keys],
        type(kernel).__name__,
        kernel.rows_sum_to,
        kernel.reads_scores,
        under,
        law=None if law is None else law * scale.square().mean().sqrt().item(),
        bound=seen.q.shape[-1] * scale.abs().max().item() if normed else None,
    )


def _law(block: Block, mean_square: float) -> float | None:
    attention = block.attention
    projections = attention.projections
    if not isinstance(projections, Separate | SharedKV | IdentityV):
        return None
    if attention.convolution is not None or not isinstance(attention.q_norm, nn.Identity):
        return None
    fused = projections.qkv
    by_name = dict(zip(fused.parts, fused.weight.split(list(fused.parts.values())), strict=True))
    d_k = by_name["q"].shape[0] // attention.n_head
    std_q, std_k = (by_name[name].double().square().mean().sqrt().item() for name in ("q", "k"))
    return block_std(d_k, fused.weight.shape[1], std_q, std_k, mean_square)


def _together(parts: list[LayerScores]) -> LayerScores:
    """Batches of windows as one; what is no tensor is that of the first."""
    first = parts[0]
    dots, weights = (torch.cat([getattr(part, name) for part in parts]) for name in ("dots", "weights"))
    others = {
        name: (factor, torch.cat([part.others[name][1] for part in parts]))
        for name, (factor, _) in first.others.items()
    }
    return replace(first, dots=dots, weights=weights, others=others)
