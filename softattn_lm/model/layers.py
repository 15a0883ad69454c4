"""The parts around attention: norms, multi-layer perceptrons, the one-token look-back and value embeddings."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.cache import KVCache, behind
from softattn_lm.attention.linear import Linear
from softattn_lm.model.activations import squared_relu, tanh_gelu

NormKind = Literal["layer", "rms"]
MLPKind = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "none"]


def make_norm(kind: NormKind, width: int, gain: bool, bias: bool) -> nn.Module:
    """`layer`: Ba et al. 2016, arXiv:1607.06450. `rms`: Zhang and Sennrich 2019, arXiv:1910.07467 (it has no bias)."""
    if kind == "layer":
        # torch offers a bias only together with a gain.
        return nn.LayerNorm(width, elementwise_affine=gain, bias=bias and gain)
    return nn.RMSNorm(width, elementwise_affine=gain)


class MLP(nn.Module):
    """(B, T, C) -> (B, T, C): down(act(up x)), or for SwiGLU down(silu(gate x) · up x).

    `gelu` is exact, `gelu_tanh` GPT-2's approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415); `relu2` is ReLU
    squared (So et al. 2021, arXiv:2109.08668); `swiglu` is Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, kind: MLPKind, d_model: int, width: int, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        self.up = Linear(d_model, width, bias=bias)
        self.gate = Linear(d_model, width, bias=bias) if kind == "swiglu" else None
        self.down = Linear(width, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activated(self.up(x), None if self.gate is None else self.gate(x)))

    def activated(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """(B, T, width) each -> the same; gate: of SwiGLU alone."""
        if gate is not None:
            return F.silu(gate) * up
        if self.kind == "relu2":
            return squared_relu(up)
        if self.kind == "gelu_tanh":
            return tanh_gelu(up)
        return F.gelu(up)


def default_width(kind: MLPKind, d_model: int) -> int:
    """4·C, or 8/3·C for the three matrices of SwiGLU, so that both have 8·C² parameters (rounded up to a multiple of
    8).
    """
    return 4 * d_model if kind != "swiglu" else 8 * math.ceil(d_model / 3)


class Smear(nn.Module):
    """x_t + g ⊙ x_{t−1}: every token also carries its predecessor, which an induction head needs; g starts at 0.

    (B, T, C) -> (B, T, C). The first token has no predecessor.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor, cache: KVCache | None, places: Tensor | None = None) -> Tensor:
        """places (B, T): positions in packed documents, whose first tokens have no predecessor either."""
        previous = behind(x, 1, "smear", cache)[:, :-1]
        if places is not None:
            previous = previous * (places > 0)[..., None]
        return x + self.gain * previous


class ValueEmbedding(nn.Module):
    """v + g_h · E[token], a table of values of its own: what a token is, whatever the layers before made of it.

    After Zhou et al. 2024, arXiv:2410.17897, with a table in place of the first layer's values.
    """

    def __init__(self, vocab_size: int, n_kv_head: int, head_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, n_kv_head * head_dim)
        self.gain = nn.Parameter(torch.ones(n_kv_head))

    def forward(self, idx: Tensor) -> Tensor:
        """(B, T) -> (B, G, T, D)."""
        values = self.table(idx).unflatten(-1, (len(self.gain), -1)).transpose(1, 2)
        return self.gain[:, None, None] * values
