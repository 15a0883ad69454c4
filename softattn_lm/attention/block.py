"""The only place that knows projections and heads: everything around a kernel, the same for every variant.

x ─ projections ─ q, k, v ─ QK norm ─ rotation ─ cache ─ kernel ─ output projection
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.cache import KVCache, expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.projections import Projections
from softattn_lm.attention.scale import Scale
from softattn_lm.attention.visibility import Visibility

if TYPE_CHECKING:
    from softattn_lm.position.base import Rotation

QKNorm = Literal["none", "rms", "rms_gain"]


@dataclass(frozen=True)
class Given:
    """What a layer is handed beside its input, made once per forward pass for all layers that share a mask and
    position.

    key_rotation turns all S keys; it is there only when keys are cached before rotation, to be one stream with values.
    """

    visible: Visibility
    rotation: Rotation | None = None
    key_rotation: Rotation | None = None
    bias: Bias | None = None


class CausalSelfAttention(nn.Module):
    """(B, T, C) -> (B, T, C).

    qk_norm: `rms` divides every query and key by its root mean square, which bounds scores by D · scale; `rms_gain`
    adds a learned gain per component. Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442.
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
    ) -> None:
        super().__init__()
        self.layer, self.n_head = layer, n_head
        self.kernel, self.scale, self.projections = kernel, scale, projections
        gained = qk_norm == "rms_gain"
        self.q_norm = nn.Identity() if qk_norm == "none" else nn.RMSNorm(head_dim, elementwise_affine=gained)
        self.k_norm = nn.Identity() if qk_norm == "none" else nn.RMSNorm(head_dim, elementwise_affine=gained)
        self.out = nn.Linear(n_head * head_dim, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        given: Given,
        *,
        value: Tensor | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """value: (B, G, T, D), added to v. Returns the output and, if asked, A of shape (B, H, T, S)."""
        q, k, v = self.projections(x)  # (B, H, T, D), (B, G, T, D) twice
        q = self.q_norm(q)
        if given.rotation is not None:
            q = given.rotation(q)
        k, v = self._keys_and_values(k, v if value is None else v + value, given, cache, one=value is None)
        features = self.kernel.features(x)
        if cache is not None and features is not None:
            features = cache.extend(self.layer, "features", features)
        scale, visible, bias = self.scale(given.visible), given.visible, given.bias
        grouped = self.kernel.grouped
        wide = k if grouped and not return_weights else expand_groups(k, self.n_head)
        values = v if grouped else expand_groups(v, self.n_head)
        y = self.kernel(q, k if grouped else wide, values, scale=scale, visible=visible, bias=bias, features=features)
        weights = None
        if return_weights:
            weights = self.kernel.weights(q, wide, scale=scale, visible=visible, bias=bias, features=features)
        return self.out(y.transpose(1, 2).flatten(2)), weights

    def _keys_and_values(
        self, k: Tensor, v: Tensor, given: Given, cache: KVCache | None, one: bool
    ) -> tuple[Tensor, Tensor]:
        """(B, G, T, D) of this call -> (B, G, S, D), normed, rotated, and with what the cache remembers."""
        if cache is not None and one and self.projections.one_stream:
            v = cache.extend(self.layer, "v", v)
            k = self.k_norm(v)
            return (k if given.key_rotation is None else given.key_rotation(k)), v
        k = self.k_norm(k)
        # Keys are stored after rotation: a cached key keeps the angle of its own position.
        if given.rotation is not None:
            k = given.rotation(k)
        if cache is not None:
            k, v = cache.extend(self.layer, "k", k), cache.extend(self.layer, "v", v)
        return k, v
