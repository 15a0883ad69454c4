"""The only place that knows projections and heads: everything around a kernel, the same for every variant.

x ─ projections ─ q, k, v ─ convolution ─ QK norm ─ rotation ─ cache ─ kernel ─ head norm ─ gate ─ output projection
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.cache import KVCache, expand_groups
from softattn_lm.attention.convolution import ShortConvolution
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.linear import Linear
from softattn_lm.attention.norm import HeadNorm
from softattn_lm.attention.projections import Projections, heads
from softattn_lm.attention.scale import Scale
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

if TYPE_CHECKING:
    from softattn_lm.position.base import Rotation

QKNorm = Literal["none", "rms", "rms_gain"]
OutputGate = Literal["none", "head", "element"]


@dataclass(frozen=True)
class Given:
    """What a layer is handed beside its input, made once per forward pass for all layers that share a mask and
    position.

    key_rotation turns all S keys; it is there only when keys are made of what the cache keeps, which is not turned.
    places: (B, T), positions of the new tokens in packed documents.
    """

    visible: Visibility
    rotation: Rotation | None = None
    key_rotation: Rotation | None = None
    bias: Bias | None = None
    places: Tensor | None = None


class Attended(NamedTuple):
    """y (B, T, C); A (B, H, T, S) if asked for; the values (B, G, T, D) of the new tokens."""

    y: Tensor
    weights: Tensor | None
    values: Tensor


class CausalSelfAttention(nn.Module):
    """(B, T, C) -> (B, T, C).

    qk_norm: `rms` divides every query and key by its root mean square, which bounds scores by D · scale; `rms_gain`
    adds a learned gain per component. Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442.
    short_conv: q, k and v also carry the tokens just before, see ShortConvolution; its width, 0 for none.
    output_gate: y_h becomes y_h · sigmoid(w_h x), one number per `head` or per `element`, so that a head can be silent
    without a sink. Qiu et al. 2025, arXiv:2505.06708.
    value_residual: v becomes λ1 v + λ2 v of the first layer; both are learned and start at 1/2. Zhou et al. 2024,
    arXiv:2410.17897.
    """

    def __init__(
        self,
        layer: int,
        d_model: int,
        n_head: int,
        head_dim: int,
        kernel: AttentionKernel,
        scale: Scale,
        projections: Projections,
        qk_norm: QKNorm,
        bias: bool,
        short_conv: int = 0,
        output_gate: OutputGate = "none",
        value_residual: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.n_head = layer, n_head
        self.kernel, self.scale, self.projections = kernel, scale, projections
        gained, n_kv_head = qk_norm == "rms_gain", projections.n_kv_head
        self.q_norm = nn.Identity() if qk_norm == "none" else HeadNorm(head_dim, elementwise_affine=gained)
        self.k_norm = nn.Identity() if qk_norm == "none" else HeadNorm(head_dim, elementwise_affine=gained)
        self.head_norm = HeadNorm(head_dim, eps=1e-5) if kernel.normed else None
        self.convolution = ShortConvolution(layer, short_conv, n_head, n_kv_head, head_dim) if short_conv else None
        self.mix = nn.Parameter(torch.full((2,), 0.5)) if value_residual and layer else None
        gates = {"none": 0, "head": n_head, "element": n_head * head_dim}[output_gate]
        self.gate = nn.Linear(d_model, gates, bias=bias) if gates else None
        self.out = Linear(n_head * head_dim, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        given: Given,
        *,
        value: Tensor | None = None,
        first: Tensor | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """value: added to v, (B, G, T, D), or (B, G, S, D) with a cache if `late`. first: (B, G, T, D), the values of
        the first layer.
        """
        kept, state = (None, cache) if self.kernel.recurrent else (cache, None)
        if state is not None and return_weights:
            raise UserError(
                f"attention {type(self.kernel).__name__} of layer {self.layer} decodes from a state, and its cache "
                "holds no keys to have weights for; ask for return_weights without a cache"
            )
        if kept is not None and self.late:
            q, k, v = self._from_cache(x, given, value, kept)
        else:
            q, k, v = self._from_input(x, given, value, first, cache)
            if kept is not None:
                k, v = kept.extend(self.layer, "k", k), kept.extend(self.layer, "v", v)
        q = _turned(self.q_norm(q), given.rotation)
        features = self.kernel.features(x)
        if kept is not None and features is not None:
            features = kept.extend(self.layer, "features", features)
        if state is not None:
            y, weights = self._recur(q, k, v, given, features, state), None
        else:
            y, weights = self._attend(q, k, v, given, features, return_weights)
        if self.head_norm is not None:
            y = self.head_norm(y) * self.kernel.head_gain
        if self.gate is not None:
            y = y * heads(self.gate(x).sigmoid(), self.n_head)
        return Attended(self.out(y.transpose(1, 2).flatten(2)), weights, v[:, :, -x.shape[1] :])

    @property
    def late(self) -> bool:
        """Whether the cache keeps what keys and values are made of: so long as no other token has a part in them."""
        alone = self.convolution is None and self.mix is None
        return self.projections.late and alone and not self.kernel.recurrent

    def _from_cache(
        self, x: Tensor, given: Given, value: Tensor | None, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q of the new tokens, and k and v of all S, made of what the cache keeps."""
        q, written = self.projections.write(x)
        k, v = self.projections.read(cache.extend(self.layer, "written", written))
        return q, _turned(self.k_norm(k), given.key_rotation), v if value is None else v + value

    def _from_input(
        self, x: Tensor, given: Given, value: Tensor | None, first: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the new tokens."""
        q, k, v = self.projections(x)  # (B, H, T, D), (B, G, T, D) twice
        if self.convolution is not None:
            q, k, v = self.convolution(q, k, v, given.places, cache)
        if value is not None:
            v = v + value
        if self.mix is not None:
            assert first is not None
            v = self.mix[0] * v + self.mix[1] * first
        # Keys are cached after rotation: a cached key keeps the angle of its own position.
        return q, _turned(self.k_norm(k), given.rotation), v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, given: Given, features: Tensor | None, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y (B, H, T, D), and A if it is asked for."""
        scale, visible, bias = self.scale(given.visible), given.visible, given.bias
        grouped = self.kernel.grouped
        wide = k if grouped and not return_weights else expand_groups(k, self.n_head)
        values = v if grouped else expand_groups(v, self.n_head)
        y = self.kernel(q, k if grouped else wide, values, scale=scale, visible=visible, bias=bias, features=features)
        if not return_weights:
            return y, None
        return y, self.kernel.weights(q, wide, scale=scale, visible=visible, bias=bias, features=features)

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, given: Given, features: Tensor | None, cache: KVCache) -> Tensor:
        """y (B, H, T, D) of the new tokens, from the state of all before."""
        k, v = expand_groups(k, self.n_head), expand_groups(v, self.n_head)
        state = cache.state(self.layer, len(q))
        y, state = self.kernel.recur(q, k, v, state, scale=self.scale(given.visible), features=features)
        cache.remember_state(self.layer, state)
        return y


def _turned(x: Tensor, rotation: Rotation | None) -> Tensor:
    return x if rotation is None else rotation(x)
