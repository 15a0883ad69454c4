"""A decoder-only transformer: x + attention(norm(x)), then x + mlp(norm(x)), and a linear read-out of the next token.

Radford et al. 2019 (GPT-2) for the pre-norm shape. The recipe is configurable where the field really differs.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softattn_lm.attention.block import CausalSelfAttention, Given, OutputGate, QKNorm
from softattn_lm.attention.cache import Keep, KVCache
from softattn_lm.attention.pattern import Pattern, of_layer
from softattn_lm.attention.projections import Projections
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.block import Block, given_width, make, turned_width
from softattn_lm.model.documents import continue_documents
from softattn_lm.model.honoured import check_kernels, check_projections
from softattn_lm.model.layers import MLP, MLPKind, NormKind, Smear, ValueEmbedding, default_width, make_norm
from softattn_lm.model.parameters import Initialiser, InitKind, ParameterRole, parameter_roles
from softattn_lm.position.base import Places, Position

Policy = Callable[..., Any]


class DecoderLM(nn.Module):
    """Token ids (B, T) -> logits (B, T, V) for the next token.

    attention, scale, position, mask and projections are policies: constructors that are handed the shapes they ask for
    (mask: an object). Attention, position and mask may be a Pattern over the layers.

    Shapes: head_dim defaults to d_model / n_head, n_kv_head to n_head, mlp_width to 4·C (SwiGLU: 8/3·C).
    final_cap: logits become c · tanh(logits / c). Riviere et al. 2024, arXiv:2408.00118. init, zero_out: see
    Initialiser. qk_norm, short_conv, output_gate, value_residual: see CausalSelfAttention.

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
        attention: Policy | Pattern,
        scale: Policy,
        position: Policy | Pattern,
        mask: Causal | Pattern,
        projections: Policy,
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
        short_conv: int = 0,
        output_gate: OutputGate = "none",
        value_residual: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % n_head:
            raise UserError(
                f"model.d_model={d_model} does not divide into model.n_head={n_head} heads; type a multiple, or give "
                "model.head_dim"
            )
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        if n_head % n_kv_head:
            raise UserError(
                f"model.n_head={n_head} does not divide into model.n_kv_head={n_kv_head} groups; type a divisor of "
                f"{n_head}"
            )
        head_dim = d_model // n_head if head_dim is None else head_dim
        if value_residual and n_layer == 1:
            raise UserError(
                "model.value_residual=true gives later layers the values of the first, and model.n_layer=1 has none; "
                "type model.value_residual=false, or model.n_layer=2"
            )
        self.vocab_size, self.context, self.n_layer, self.final_cap = vocab_size, context, n_layer, final_cap
        self.short_conv = short_conv
        self.recomputes = False  # blocks keep their input alone, and are computed again backwards
        self.masks: list[Causal] = [of_layer(mask, layer) for layer in range(n_layer)]
        shapes = {
            "n_head": n_head,
            "n_kv_head": n_kv_head,
            "head_dim": head_dim,
            "d_model": d_model,
            "context": context,
            "bias": bias,
        }

        self.embed = nn.Embedding(vocab_size, d_model)
        policies = position.layers if isinstance(position, Pattern) else [position]
        projected: list[Projections] = [make(projections, **shapes) for _ in range(n_layer)]
        added = {"short_conv": short_conv, "value_embeddings": value_embeddings, "value_residual": value_residual}
        for each in projected[:1]:
            check_projections(each, added)
        self.positions = nn.ModuleList([make(p, **shapes | turned_width(projected, p)) for p in policies])
        if len(policies) > 1 and self.absolute:
            raise UserError(
                "position.pattern mixes policies per layer, and learned or sinusoidal ones act on the input; use "
                "rotary, alibi, none"
            )
        self.embed_norm = make_norm(norm, d_model, norm_gain, bias) if embed_norm else None
        self.smear = Smear(d_model) if smear else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList()
        for layer in range(n_layer):
            attended = CausalSelfAttention(
                layer,
                d_model,
                n_head,
                head_dim,
                kernel=make(of_layer(attention, layer), layer=layer, **shapes),
                scale=make(scale, **shapes),
                projections=projected[layer],
                qk_norm=qk_norm,
                bias=bias,
                short_conv=short_conv,
                output_gate=output_gate,
                value_residual=value_residual,
            )
            width = (mlp_width or default_width(mlp, d_model)) + given_width(projected[layer], mlp, shapes)
            block_mlp = None if mlp == "none" else MLP(mlp, d_model, width, bias)
            # Every second layer, the last included.
            value = (
                ValueEmbedding(vocab_size, n_kv_head, head_dim) if value_embeddings and (n_layer - layer) % 2 else None
            )
            norms = [make_norm(norm, d_model, norm_gain, bias) for _ in range(2)]
            self.blocks.append(Block(attended, block_mlp, value, norms, dropout))
        check_kernels([block.attention for block in self.layers], self.masks, self.position_per_layer)
        self.final_norm = make_norm(norm, d_model, norm_gain, bias)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_head:
            self.head.weight = self.embed.weight
        initialiser = Initialiser(seed, n_layer, init, init_q or init, init_k or init, zero_out)
        initialiser.fill(self, self.parameter_roles(), tie_head)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        *,
        documents: Tensor | None = None,
        return_weights: bool = False,
        start: int = 0,
        targets: Tensor | None = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Any:
        """(B, T) int64 -> logits (B, T, V); with return_weights a pair (logits, [A of shape (B, H, T, S) per layer]).

        cache: what earlier calls remembered; this call's tokens are added to it. start: position of the first token
        when there is no cache. documents (B, T): which packed text each token belongs to, −1 for padding; needs a mask
        that keeps documents apart. A query reads at most `context` keys, itself included, however long the text is;
        that of a recurrent kernel reads all of it. loss: what to make, in place of logits, of the final states (B, T,
        C), the head, the final cap and `targets`.
        """
        if documents is not None and not self.packs_documents:
            raise UserError(
                "this batch holds packed documents, and the mask lets them see each other; type mask=documents"
            )
        if documents is not None and cache is not None and any(mask.sinks for mask in self.masks):
            raise UserError(
                "a cache keeps the first tokens of a row, not of each document; decode packed documents with "
                "mask.sinks=0"
            )
        new = idx.shape[1]
        if cache is not None:
            start = cache.length
            cache.reserve(new)
        places: Places = range(start, start + new)
        if documents is not None:
            places = continue_documents(documents, cache)  # (B, T)
        given = self._given(places, start, new, documents, cache, idx.device)
        x = self._embed(idx, places, cache)
        every_layer, first = [], None
        for block, here in zip(self.layers, given, strict=True):
            if self.recomputes and torch.is_grad_enabled() and cache is None and not return_weights:
                x, weights, values = checkpoint(block, x, idx, here, None, False, first, use_reentrant=False)
            else:
                x, weights, values = block(x, idx, here, cache, return_weights, first)
            every_layer.append(weights)
            first = values if first is None else first
        if cache is not None:
            cache.advance(new)
        x = self.final_norm(x)
        if loss is not None:
            return loss(x, self.head, self.final_cap, targets)
        logits = self.head(x)  # (B, T, V)
        if self.final_cap is not None:
            logits = self.final_cap * torch.tanh(logits / self.final_cap)
        return (logits, every_layer) if return_weights else logits

    def _embed(self, idx: Tensor, places: Places, cache: KVCache | None) -> Tensor:
        x = self.embed(idx)  # (B, T, C)
        for position in self.positions:
            code = cast(Position, position).embed(places)
            x = x if code is None else x + code
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.smear is not None:
            x = self.smear(x, cache, places if isinstance(places, Tensor) else None)
        return self.dropout(x)

    def _given(
        self,
        places: Places,
        start: int,
        new: int,
        documents: Tensor | None,
        cache: KVCache | None,
        device: torch.device,
    ) -> list[Given]:
        """What each layer is handed; layers with the same mask and position share one object."""
        made: dict[tuple[int, int, bool], Given] = {}
        positions = self.position_per_layer
        late = cache is not None and any(block.attention.late for block in self.layers)
        own = places if isinstance(places, Tensor) else None
        layers = []
        for layer, (mask, position) in enumerate(zip(self.masks, positions, strict=True)):
            recurrent = self.recurrent[layer]
            key = (id(mask), id(position), recurrent)
            if key not in made:
                past = 0 if cache is None else cache.length if recurrent else cache.past(layer)
                shared = Visibility(new, past, start=start, documents=documents, device=device)
                if documents is not None and own is not None:
                    shared = shared.remember(documents, own, cache, layer)
                # A state reads all of the past; its masks have no window, which its kernel refuses.
                visible = shared if recurrent else mask.visibility(shared, self.context)
                rotation, key_rotation = position.rotation(places), None
                if late and rotation is not None and not recurrent:
                    of_keys = visible.key_positions if shared.places is None else shared.places
                    key_rotation = position.rotation(of_keys)
                made[key] = Given(visible, rotation, key_rotation, position.bias(visible), own)
            layers.append(made[key])
        return layers

    def new_cache(self) -> KVCache:
        """An empty cache that keeps what the next query of each layer may read besides itself; of a recurrent one its
        state, and no tokens.
        """
        tokens = [Keep(mask.span(self.context) - 1, mask.sinks) for mask in self.masks]
        return KVCache([Keep(0) if state else keep for keep, state in zip(tokens, self.recurrent, strict=True)])

    @property
    def recurrent(self) -> list[bool]:
        """Of each layer: whether decoding remembers a state in the place of keys and values."""
        return [block.attention.kernel.recurrent for block in self.layers]

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    @property
    def position_per_layer(self) -> list[Position]:
        return [cast(Position, self.positions[layer % len(self.positions)]) for layer in range(self.n_layer)]

    def cache_bytes_per_token(self) -> int:
        """What decoding remembers of one more token, over all layers, until its window has passed."""
        return self._cache_of_one_token().bytes_per_token()

    def cache_state_bytes(self) -> int:
        """What decoding remembers however many tokens there are, over all layers."""
        return self._cache_of_one_token().state_bytes()

    @torch.no_grad()
    def _cache_of_one_token(self) -> KVCache:
        cache, was_training = self.new_cache(), self.training
        self.eval()(torch.zeros(1, 1, dtype=torch.long, device=self.embed.weight.device), cache)
        self.train(was_training)
        return cache

    @property
    def packs_documents(self) -> bool:
        """Whether its masks keep packed documents apart, so that a batch should tell which token is of which."""
        return all(mask.documents for mask in self.masks)

    @property
    def absolute(self) -> bool:
        """Whether text beyond the context must be encoded again."""
        return any(position.absolute for position in self.position_per_layer)

    @property
    def receptive_field(self) -> int | None:
        """How many last tokens can influence a logit, however long the text is; None if the first ones always can."""
        if any(self.recurrent) or any(mask.sinks for mask in self.masks):
            return None
        convolved = self.n_layer * max(0, self.short_conv - 1)
        return sum(mask.span(self.context) - 1 for mask in self.masks) + convolved + 1 + (self.smear is not None)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def parameter_roles(self) -> list[ParameterRole]:
        """Every parameter exactly once, in the order of `named_parameters`."""
        tables = [p for position in self.position_per_layer if position.absolute for p in position.parameters()]
        return parameter_roles(self, self.head.weight, tables)

    def explain_kernels(self, device: str) -> list[str]:
        """One line per choice of implementation that a kernel makes by itself at full context, for a person to read."""
        lines = []
        for layer, (block, mask) in enumerate(zip(self.layers, self.masks, strict=True)):
            visible = mask.visibility(Visibility(self.context), self.context)
            biased = self.position_per_layer[layer].bias(visible) is not None
            lines.append(block.attention.kernel.explain(visible, device, biased))
        return sorted({line for line in lines if line is not None})
