"""The only place that knows projections and heads: everything around a kernel, the same for every variant.

    x ─ projections ─ q, k, v ─ QK norm ─ rotation ─ cache ─ kernel ─ output projection
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from softattn_lm.attention.cache import KVCache, expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.projections import Projections
from softattn_lm.attention.scale import Scale
from softattn_lm.attention.visibility import Visibility

if TYPE_CHECKING:
    from softattn_lm.position.base import Rotation

QKNorm = Literal["none", "rms", "rms_gain"]


class CausalSelfAttention(nn.Module):
    """(B, T, C) -> (B, T, C).

    qk_norm: `rms` divides every query and key by its root mean square, which bounds scores by D · scale; `rms_gain` adds
    a learned gain per component. Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442.
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
        self.normed = qk_norm != "none"
        gained = qk_norm == "rms_gain"
        self.q_norm = nn.RMSNorm(head_dim, elementwise_affine=gained) if self.normed else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, elementwise_affine=gained) if self.normed else nn.Identity()
        self.out = nn.Linear(n_head * head_dim, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        visible: Visibility,
        *,
        rotation: Rotation | None = None,
        bias: Tensor | None = None,
        value: Tensor | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """value: (B, G, T, D), added to v. Returns the output and, if asked, A of shape (B, H, T, S)."""
        q, k, v = self.projections(x)  # (B, H, T, D), (B, G, T, D) twice
        if value is not None:
            v = v + value
        q, k = self.q_norm(q), self.k_norm(k)
        # Keys are stored after rotation: a cached key keeps the angle of its own position.
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        features = self.kernel.features(x)
        if cache is not None:
            k, v = cache.extend(self.layer, "k", k), cache.extend(self.layer, "v", v)  # (B, G, S, D)
            if features is not None:
                features = cache.extend(self.layer, "features", features)
        scale = self.scale(visible)
        wide = expand_groups(k, self.n_head) if return_weights or not self.kernel.grouped else k
        values = v if self.kernel.grouped else expand_groups(v, self.n_head)
        y = self.kernel(q, k if self.kernel.grouped else wide, values, scale=scale, visible=visible, bias=bias, features=features)
        weights = None
        if return_weights:
            weights = self.kernel.weights(q, wide, scale=scale, visible=visible, bias=bias, features=features)
        return self.out(y.transpose(1, 2).flatten(2)), weights
