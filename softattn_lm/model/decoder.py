"""A decoder-only transformer: x + attention(norm(x)), then x + mlp(norm(x)), and a linear read-out of the next token.

Radford et al. 2019 (GPT-2) for the pre-norm shape. The recipe is configurable where the field really differs.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softattn_lm.attention.block import CausalSelfAttention, QKNorm
from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.projections import FusedLinear
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.initialise import InitKind, stream
from softattn_lm.model.layers import MLP, MLPKind, NormKind, Smear, ValueEmbedding, default_width, make_norm
from softattn_lm.position.base import Position

Role = Literal["embedding", "head", "hidden", "vector"]


@dataclass(frozen=True)
class ParameterRole:
    """What an optimizer needs to know of a parameter. `rows`: heights of the parts of a fused matrix, which are matrices
    of their own; (shape[0],) for an ordinary one. A tied head appears once, as the embedding."""

    name: str
    parameter: nn.Parameter
    role: Role
    rows: tuple[int, ...]


def make(policy: Callable[..., Any], **shapes: int | bool) -> Any:
    """Build a policy: its constructor is handed each shape that it asks for by name and that the user has not given."""
    bound = getattr(policy, "keywords", {})
    asked = inspect.signature(policy).parameters
    return policy(**{name: shape for name, shape in shapes.items() if name in asked and name not in bound})


class Block(nn.Module):
    """One layer: attention, then the MLP if there is one, each behind a norm and added to the stream."""

    def __init__(
        self, attention: CausalSelfAttention, mlp: MLP | None, value: ValueEmbedding | None, norms: list[nn.Module], dropout: float
    ) -> None:
        super().__init__()
        self.attention, self.mlp, self.value = attention, mlp, value
        self.attention_norm = norms[0]
        self.mlp_norm = norms[1] if mlp is not None else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, idx: Tensor, visible: Visibility, **given: Any) -> tuple[Tensor, Tensor | None]:
        value = None if self.value is None else self.value(idx)  # (B, G, T, D)
        y, weights = self.attention(self.attention_norm(x), visible, value=value, **given)
        x = x + self.dropout(y)
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x, weights


class DecoderLM(nn.Module):
    """Token ids (B, T) -> logits (B, T, V) for the next token.

    Shapes: head_dim defaults to d_model / n_head, n_kv_head to n_head, mlp_width to 4·C (SwiGLU: 8/3·C).

    init: `gpt2` draws matrices from N(0, 0.02²), the ones that write to the residual stream smaller by √(2·n_layer);
    `fan_in` keeps activations at unit variance. init_q and init_k choose for W_q and W_k apart.
    zero_out: the matrices that write to the residual stream, and an untied head, start at 0.
    final_cap: logits become c · tanh(logits / c). Riviere et al. 2024, arXiv:2408.00118.

    Raises UserError when parts do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_layer: int,
        n_head: int,
        d_model: int,
        attention: Callable[..., Any],
        scale: Callable[..., Any],
        position: Callable[..., Any],
        mask: Causal,
        projections: Callable[..., Any],
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        qk_norm: QKNorm = "none",
        norm: NormKind = "rms",
        norm_gain: bool = True,
        embed_norm: bool = False,
        mlp: MLPKind = "gelu",
        mlp_width: int | None = None,
        bias: bool = False,
        tie_head: bool = False,
        init: InitKind = "fan_in",
        init_q: InitKind | None = None,
        init_k: InitKind | None = None,
        zero_out: bool = False,
        final_cap: float | None = None,
        smear: bool = False,
        value_embeddings: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % n_head:
            raise UserError(f"model.d_model={d_model} does not divide into model.n_head={n_head} heads; type a multiple, or give model.head_dim")
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        if n_head % n_kv_head:
            raise UserError(f"model.n_head={n_head} does not divide into model.n_kv_head={n_kv_head} groups; type a divisor of {n_head}")
        head_dim = d_model // n_head if head_dim is None else head_dim
        self.vocab_size, self.context, self.n_layer = vocab_size, context, n_layer
        self.mask, self.final_cap = mask, final_cap
        shapes = {"n_head": n_head, "n_kv_head": n_kv_head, "head_dim": head_dim, "d_model": d_model, "context": context, "bias": bias}

        self.embed = nn.Embedding(vocab_size, d_model)
        self.position: Position = make(position, **shapes)
        self.embed_norm = make_norm(norm, d_model, norm_gain, bias) if embed_norm else None
        self.smear = Smear(d_model) if smear else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList()
        for layer in range(n_layer):
            block_attention = CausalSelfAttention(
                layer,
                d_model,
                n_head,
                head_dim,
                kernel=make(attention, layer=layer, **shapes),
                scale=make(scale, **shapes),
                projections=make(projections, **shapes),
                qk_norm=qk_norm,
                bias=bias,
            )
            block_mlp = None if mlp == "none" else MLP(mlp, d_model, mlp_width or default_width(mlp, d_model), bias)
            # Every second layer, the last included.
            value = ValueEmbedding(vocab_size, n_kv_head, head_dim) if value_embeddings and (n_layer - layer) % 2 else None
            norms = [make_norm(norm, d_model, norm_gain, bias) for _ in range(2)]
            self.blocks.append(Block(block_attention, block_mlp, value, norms, dropout))
        self.final_norm = make_norm(norm, d_model, norm_gain, bias)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_head:
            self.head.weight = self.embed.weight
        self._initialise(seed, init, init_q or init, init_k or init, zero_out, tie_head)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, idx: Tensor, cache: KVCache | None = None, *, return_weights: bool = False, start: int = 0
    ) -> Any:
        """(B, T) int64 -> logits (B, T, V); with return_weights a pair (logits, [A of shape (B, H, T, S) per layer]).

        cache: what earlier calls remembered; this call's tokens are added to it. start: position of the first token when
        there is no cache. A query reads at most `context` keys, itself included, however long the text is.
        """
        new = idx.shape[1]
        if cache is not None:
            start = cache.length
            cache.reserve(new)
        past = 0 if cache is None else cache.past
        visible = Visibility(new, past, self.mask.span(self.context), idx.device)
        rotation, bias = self.position.rotation(start, new), self.position.bias(visible)
        x = self.embed(idx)  # (B, T, C)
        code = self.position.embed(start, new)
        if code is not None:
            x = x + code
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.smear is not None:
            x = self.smear(x, cache)
        x = self.dropout(x)
        every_layer = []
        for block in self.blocks:
            x, weights = block(x, idx, visible, rotation=rotation, bias=bias, cache=cache, return_weights=return_weights)
            every_layer.append(weights)
        if cache is not None:
            cache.advance(new)
        logits = self.head(self.final_norm(x))  # (B, T, V)
        if self.final_cap is not None:
            logits = self.final_cap * torch.tanh(logits / self.final_cap)
        return (logits, every_layer) if return_weights else logits

    def new_cache(self) -> KVCache:
        """An empty cache that keeps what the next query may read besides itself."""
        return KVCache(keep=self.mask.span(self.context) - 1)

    @property
    def receptive_field(self) -> int:
        """How many last tokens can influence a logit, however long the text is."""
        return self.n_layer * (self.mask.span(self.context) - 1) + 1 + (self.smear is not None)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def parameter_roles(self) -> list[ParameterRole]:
        """Every parameter exactly once, in the order of `named_parameters`."""
        fused = {id(m.weight): tuple(m.parts.values()) for m in self.modules() if isinstance(m, FusedLinear)}
        embeddings = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        if self.position.absolute:
            embeddings |= {id(p) for p in self.position.parameters()}
        roles = []
        for name, parameter in self.named_parameters():
            role: Role = "vector"
            if id(parameter) in embeddings:
                role = "embedding"
            elif parameter is self.head.weight:
                role = "head"
            elif parameter.ndim == 2:
                role = "hidden"
            roles.append(ParameterRole(name, parameter, role, fused.get(id(parameter), (parameter.shape[0],))))
        return roles

    @torch.no_grad()
    def _initialise(self, seed: int, init: InitKind, init_q: InitKind, init_k: InitKind, zero_out: bool, tied: bool) -> None:
        """Matrices and tables draw from their streams; gains, biases and smear keep what their constructors gave them."""
        kinds: dict[str, InitKind] = {"q": init_q, "k": init_k}
        writers = {f"blocks.{i}.{part}.weight" for i in range(self.n_layer) for part in ("attention.out", "mlp.down")}
        depth = 1 / math.sqrt(2 * self.n_layer)
        fused = {f"{name}.weight": m.parts for name, m in self.named_modules() if isinstance(m, FusedLinear)}
        for named in self.parameter_roles():
            name, values, role = named.name, named.parameter, named.role
            if role == "vector":
                continue
            if zero_out and (name in writers or role == "head"):
                values.zero_()
                continue
            first = 0
            for part, rows in fused.get(name, {"": values.shape[0]}).items():
                std = 0.02
                if kinds.get(part, init) == "fan_in":
                    wide = role == "embedding" and not (tied and values is self.embed.weight)
                    std = 1.0 if wide else values.shape[1] ** -0.5
                if name in writers:
                    std *= depth
                own = f"{name.removesuffix('weight')}{part}" if part else name
                values[first : first + rows] = std * stream(seed, own, (rows, *values.shape[1:]))
                first += rows
