"""One layer, and how a policy becomes the object that a layer uses."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softattn_lm.attention.block import Attended, CausalSelfAttention, Given
from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.projections import Projections, Separate
from softattn_lm.errors import UserError
from softattn_lm.model.layers import MLP, MLPKind, ValueEmbedding
from softattn_lm.position.rotary import Rotary


def make(policy: Callable[..., Any], **shapes: int | bool) -> Any:
    """Build a policy: its constructor is handed each shape that it asks for by name and that the user has not given."""
    bound = getattr(policy, "keywords", {})
    asked = inspect.signature(policy).parameters
    return policy(**{name: shape for name, shape in shapes.items() if name in asked and name not in bound})


def turned_width(projections: Sequence[Projections], position: Callable[..., Any]) -> dict[str, int]:
    """The head_dim of a position that may turn a part of each head only. Raises UserError if that part is empty."""
    width = projections[0].turned if projections else None
    if width is None:
        return {}
    if width == 0 and getattr(position, "func", position) is Rotary:
        raise UserError(
            "projections.rope_dim=0 leaves position=rotary nothing to turn; type an even projections.rope_dim, or "
            "position=none"
        )
    return {"head_dim": width}


class Block(nn.Module):
    """One layer: attention, then the MLP if there is one, each behind a norm and added to the stream."""

    def __init__(
        self,
        attention: CausalSelfAttention,
        mlp: MLP | None,
        value: ValueEmbedding | None,
        norms: list[nn.Module],
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention, self.mlp, self.value = attention, mlp, value
        self.attention_norm = norms[0]
        self.mlp_norm = norms[1] if mlp is not None else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        idx: Tensor,
        given: Given,
        cache: KVCache | None,
        return_weights: bool,
        first: Tensor | None = None,
    ) -> Attended:
        """first: the values of the first layer, (B, G, T, D). The answer's y is the stream."""
        if self.value is not None and cache is not None and self.attention.late:
            # Values are made again of what the cache keeps, and a table needs nothing but the tokens.
            idx = cache.extend(self.attention.layer, "tokens", idx[:, None, :, None])[:, 0, :, 0]  # (B, S)
        value = None if self.value is None else self.value(idx)
        y, weights, values = self.attention(
            self.attention_norm(x), given, value=value, first=first, cache=cache, return_weights=return_weights
        )
        x = x + self.dropout(y)
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return Attended(x, weights, values)


def given_width(projections: Projections, mlp: MLPKind, shapes: Mapping[str, Any]) -> int:
    """By how much to widen an MLP so that it takes up what the projections save."""
    if not projections.give_to_mlp:
        return 0
    if mlp == "none":
        raise UserError(
            "projections.give_to_mlp=true has no MLP to give to (model.mlp=none); type projections.give_to_mlp=false"
        )
    with torch.device("meta"):
        full = make(Separate, **shapes)
    saved = sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in projections.parameters())
    return round(saved / ((3 if mlp == "swiglu" else 2) * shapes["d_model"]))
