"""One token at a time, flat: a decode step of a model whose every part is known here, without a module call.

    x ─ norm ─ q, k, v ─ QK norm ─ turn ─ ring ─ softmax ─ out ─ norm ─ MLP       rows (B, ·), one token of each sample

A step of a small model is a hundred products of a vector and a matrix, microseconds each, and an ordinary forward pass
spends most of its time on the way to them. It costs one more copy of the weights, laid out for rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.block import CausalSelfAttention
from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.kernels.auto import Auto
from softattn_lm.attention.kernels.blockwise import Blockwise
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.linear import Linear
from softattn_lm.attention.norm import HeadNorm
from softattn_lm.attention.projections import FusedLinear, Separate
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt
from softattn_lm.attention.visibility import Visibility
from softattn_lm.model.block import Block
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.layers import MLP, Smear, ValueEmbedding
from softattn_lm.model.ring import Ring, Turns
from softattn_lm.model.rows import Matrix, norm, rms
from softattn_lm.position.base import Position
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from softattn_lm.position.sinusoidal import Sinusoidal

KNOWN = {
    *(DecoderLM, Block, CausalSelfAttention, MLP, Smear, ValueEmbedding),
    *(Formula, SDPA, Blockwise, Auto, Separate, FusedLinear, InverseSqrt, InverseDim, Constant),
    *(Rotary, Learned, Sinusoidal, NoPosition),
    *(nn.Embedding, nn.Linear, Linear, nn.LayerNorm, nn.RMSNorm, HeadNorm, nn.Identity, nn.Dropout, nn.ModuleList),
}
KNOWN_PARAMETERS = re.compile(
    r"(embed|head|embed_norm|final_norm)\.\w+|smear\.gain|positions\.\d+\.table|"
    r"blocks\.\d+\.(attention_norm\.\w+|mlp_norm\.\w+|value\.(table\.weight|gain)|mlp\.(up|gate|down)\.\w+|"
    r"attention\.(projections\.qkv|q_norm|k_norm|out)\.\w+)"
)
# Multiplications of a step, on a CPU: below, waiting for a second thread costs more than it does.
ALONE = 2**21


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def knows(model: DecoderLM) -> bool:
    """Whether a plan computes what the model does. A part, parameter or hook that is not known here says no."""
    return (
        model.embed.weight.device.type in ("cpu", "cuda")
        and all(type(part) in KNOWN for part in model.modules())
        and all(KNOWN_PARAMETERS.fullmatch(name) for name, _ in model.named_parameters())
        and not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        and all(_plain(block.attention) for block in model.layers)
    )


def _plain(attention: CausalSelfAttention) -> bool:
    kernel = attention.kernel
    even = attention.out.in_features // attention.n_head % 2 == 0
    return even and (isinstance(kernel, SDPA) or (kernel.soft_cap is None and kernel.sink is None))


class Decode:
    """(B,) ids of the next token of each sample -> (B, V) logits of the one behind it. Continues what `cache` holds.

    cache: of one text for each sample, or of one with which all of them begin. room: tokens of the longest text there
    will be, those in the cache included. alone: a step is so small that one thread computes it, and other threads that
    start meanwhile may find torch's number of threads at one.
    """

    def __init__(self, model: DecoderLM, cache: KVCache, batch: int, room: int) -> None:
        self.table, device = model.embed.weight.detach(), model.embed.weight.device
        self.length, self.dtype = cache.length, torch.promote_types(self.table.dtype, torch.float32)
        self.narrow = self.table.dtype != self.dtype
        codes = [code for p in model.positions if (code := cast(Position, p).embed(range(model.context))) is not None]
        self.codes = codes[0].to(self.dtype) if codes else None  # (context, C); positions in layers give none
        self.embed_norm = None if model.embed_norm is None else norm(model.embed_norm, self.dtype, device)
        self.before, self.smear = cache.fixed.get("smear"), None
        if model.smear is not None and self.before is not None:
            self.before, self.smear = self.before[:, 0].to(self.dtype), model.smear.gain.to(self.dtype)
        self.turns = [Turns(cast(Position, position), self.dtype, device) for position in model.positions]
        of_mask: dict[int, Ring] = {}
        self.layers: list[tuple[_Layer, Ring, Turns]] = []
        for layer, (block, mask) in enumerate(zip(model.layers, model.masks, strict=True)):
            if id(mask) not in of_mask:
                same = [other for other, its in enumerate(model.masks) if its is mask]
                of_mask[id(mask)] = Ring(cache, same, mask.span(model.context), mask.sinks, batch, room, self.dtype)
            turns = self.turns[layer % len(self.turns)]
            self.layers.append((_Layer(block, turns, batch, self.dtype), of_mask[id(mask)], turns))
            of_mask[id(mask)].turn_pairs(layer, turns)
        self.rings = list(of_mask.values())
        self.final_norm = norm(model.final_norm, self.dtype, device)
        self.head, self.cap = Matrix(model.head.weight, None, batch), model.final_cap
        read = [p.numel() for name, p in model.blocks.named_parameters() if p.ndim == 2 and ".value." not in name]
        kept = 2 * self.table.shape[1] * sum(min(room, mask.span(room)) for mask in model.masks)
        self.alone = device.type == "cpu" and batch * (sum(read) + model.head.weight.numel() + kept) < ALONE

    def __call__(self, ids: Tensor) -> Tensor:
        if not self.alone:
            return self._step(ids)
        with one_thread():
            return self._step(ids)

    def _step(self, ids: Tensor) -> Tensor:
        position = self.length
        self.length += 1
        x = torch.embedding(self.table, ids)  # (B, C)
        if self.narrow:
            x = x.to(self.dtype)
        if self.codes is not None:
            x.add_(self.codes[position])
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.smear is not None and self.before is not None:
            x, self.before = torch.addcmul(x, self.smear, self.before), x
        for turns in self.turns:
            turns.go_to(position)
        for ring in self.rings:
            ring.go_to(position)
        for layer, ring, turns in self.layers:
            x = layer(x, ids, turns.now, ring.unseen, *next(ring.rows))
        logits = self.head(self.final_norm(x))  # (B, V)
        if self.narrow:
            logits = logits.to(self.dtype)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class _Layer:
    def __init__(self, block: Block, turns: Turns, batch: int, dtype: torch.dtype) -> None:
        device = block.attention.out.weight.device
        self.norm = norm(block.attention_norm, dtype, device)
        self.attend = _Attention(block.attention, turns, batch, dtype)
        self.values = self.mlp = None
        if block.value is not None:
            gains = block.value.gain.repeat_interleave(self.attend.v.shape[-1])
            self.values = (block.value.table.weight * gains).to(dtype)  # (V, G·D)
        if block.mlp is not None and block.mlp_norm is not None:
            self.mlp_norm, self.mlp = norm(block.mlp_norm, dtype, device), _MLP(block.mlp, batch)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        turn: Tensor | None,
        unseen: Tensor,
        new: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """x: (B, C); turn, unseen, new, keys, values: see _Attention."""
        added = None if self.values is None else F.embedding(ids, self.values)
        x = self.attend(x, self.norm(x), added, turn, unseen, new, keys, values)
        return x if self.mlp is None else self.mlp(x, self.mlp_norm(x))


class _Attention:
    """Every buffer and view that is the same at each step is made once."""

    def __init__(self, attention: CausalSelfAttention, turns: Turns, batch: int, dtype: torch.dtype) -> None:
        linear = cast(Separate, attention.projections).qkv
        h, g = attention.n_head, attention.projections.n_kv_head
        d = attention.out.in_features // h
        turned = turns.order(d, (h + g) * d)
        weight: Tensor = linear.weight
        bias: Tensor | None = linear.bias
        if turns.half:
            order = torch.cat((turned, torch.arange(len(turned), (h + 2 * g) * d, device=turned.device)))
            weight, bias = weight[order], None if bias is None else bias[order]
        self.qkv = Matrix(weight, bias, batch)
        self.out = Matrix(attention.out.weight, attention.out.bias, batch)
        self.scale = attention.scale(Visibility(1))
        self.qk_norm = None
        if isinstance(attention.q_norm, nn.RMSNorm) and isinstance(attention.k_norm, nn.RMSNorm):
            gain = None
            if attention.q_norm.weight is not None:
                gains = attention.q_norm.weight.repeat(h), attention.k_norm.weight.repeat(g)
                gain = torch.cat(gains)[turned].view(h + g, d).to(dtype)
            self.qk_norm = rms(d, attention.q_norm.eps, gain, dtype, turned.device)

        self.row = torch.zeros(batch, (h + 2 * g) * d, dtype=dtype, device=turned.device)
        heads = self.row.view(batch, h + 2 * g, d)
        self.asked, self.qk, self.v = heads[:, :h], heads[:, : h + g], heads[:, h + g :]
        self.kv = heads[:, h:].unflatten(1, (2, g)).transpose(0, 1)  # (2, B, G, D)
        self.pairs = torch.view_as_complex(self.qk.unflatten(-1, (-1, 2)))  # (B, H + G, D/2)
        # The queries of a group are the rows of one product; those of several samples do not lie evenly: copied.
        self.copied = None if batch == 1 else torch.empty_like(self.asked.contiguous())
        self.q = (self.asked if self.copied is None else self.copied).view(batch * g, h // g, d)
        self.read = torch.empty_like(self.q)
        self.read_row = self.read.view(batch, h * d)
        self.scores = self.row[:, :0]  # (B·G, H/G, S), of as many slots as are laid out

    def __call__(
        self,
        stream: Tensor,
        x: Tensor,
        added: Tensor | None,
        turn: Tensor | None,
        unseen: Tensor,
        new: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """stream, x (B, C) -> stream + attention(x). added: (B, G·D), to the values. turn: (D/2,), complex.

        unseen: (1, 1, S), −∞ where a slot is empty, else 0.
        new: (2, B, G, D), where this token's key and value go, which is in keys (B·G, D, S) and values (B·G, S, D).
        """
        self.qkv.into(self.row, x)
        if added is not None:
            self.v.add_(added.view_as(self.v))
        if self.qk_norm is not None:
            self.qk.copy_(self.qk_norm(self.qk))
        if turn is not None:
            self.pairs.mul_(turn)
        new.copy_(self.kv)
        if self.copied is not None:
            self.copied.copy_(self.asked)
        if self.scores.shape[-1] != keys.shape[-1]:
            self.scores = torch.empty(*self.q.shape[:2], keys.shape[-1], dtype=keys.dtype, device=keys.device)
        torch.baddbmm(unseen, self.q, keys, alpha=self.scale, out=self.scores)
        torch.softmax(self.scores, -1, out=self.scores)
        torch.bmm(self.scores, values, out=self.read)
        return self.out.onto(stream, self.read_row)


class _MLP:
    def __init__(self, mlp: MLP, batch: int) -> None:
        parts = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
        bias = None if mlp.up.bias is None else torch.cat([part.bias for part in parts])
        self.kind, self.down = mlp.kind, Matrix(mlp.down.weight, mlp.down.bias, batch)
        self.up = Matrix(torch.cat([part.weight for part in parts]), bias, batch)

    def __call__(self, stream: Tensor, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "relu2":
            h = h.relu_().mul_(h)
        elif self.kind == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        return self.down.onto(stream, h)
