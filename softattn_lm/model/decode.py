"""One token at a time, flat: a decode step of a model whose every part is known here, without a module call.

    x ─ norm ─ q, k, v ─ QK norm ─ turn ─ ring ─ softmax ─ out ─ norm ─ MLP       rows (B, ·), one token of each sample

A step of a small model is a hundred products of a vector and a matrix, microseconds each, and an ordinary forward pass
spends most of its time on the way to them. It costs one more copy of the weights, laid out for rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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
from softattn_lm.attention.projections import FusedLinear, Separate
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt
from softattn_lm.attention.visibility import Visibility
from softattn_lm.model.block import Block
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.layers import MLP, Smear, ValueEmbedding
from softattn_lm.position.base import Position
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from softattn_lm.position.sinusoidal import Sinusoidal

KNOWN = {
    *(DecoderLM, Block, CausalSelfAttention, MLP, Smear, ValueEmbedding),
    *(Formula, SDPA, Blockwise, Auto, Separate, FusedLinear, InverseSqrt, InverseDim, Constant),
    *(Rotary, Learned, Sinusoidal, NoPosition),
    *(nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.ModuleList),
}
KNOWN_PARAMETERS = re.compile(
    r"(embed|head|embed_norm|final_norm)\.\w+|smear\.gain|positions\.\d+\.table|"
    r"blocks\.\d+\.(attention_norm\.\w+|mlp_norm\.\w+|value\.(table\.weight|gain)|mlp\.(up|gate|down)\.\w+|"
    r"attention\.(projections\.qkv|q_norm|k_norm|out)\.\w+)"
)
PACK_FROM = 2**17  # entries of a float32 matrix: below, oneDNN's call costs more than its layout gains
TURNS = 256  # positions whose angles are computed at once


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

    room: tokens of the longest text there will be, those in the cache included.
    """

    def __init__(self, model: DecoderLM, cache: KVCache, batch: int, room: int) -> None:
        weight = model.embed.weight
        self.length, self.dtype = cache.length, torch.promote_types(weight.dtype, torch.float32)
        self.table = weight.detach()
        codes = [code for p in model.positions if (code := cast(Position, p).embed(range(model.context))) is not None]
        self.codes = codes[0].to(self.dtype) if codes else None  # (context, C); positions in layers give none
        self.embed_norm = None if model.embed_norm is None else _norm(model.embed_norm, self.dtype)
        self.before, self.smear = cache.fixed.get("smear"), None
        if model.smear is not None and self.before is not None:
            self.before, self.smear = self.before[:, 0].to(self.dtype), model.smear.gain.to(self.dtype)
        self.turns = [_Turns(cast(Position, position), self.dtype, weight.device) for position in model.positions]
        self.rings: list[_Ring] = []
        of_mask: dict[int, _Ring] = {}
        self.layers: list[tuple[_Layer, _Ring, _Turns]] = []
        for layer, (block, mask) in enumerate(zip(model.layers, model.masks, strict=True)):
            if id(mask) not in of_mask:
                same = [other for other, its in enumerate(model.masks) if its is mask]
                of_mask[id(mask)] = _Ring(cache, same, mask.span(model.context), mask.sinks, room, self.dtype)
            turns = self.turns[layer % len(self.turns)]
            self.layers.append((_Layer(block, turns, batch, self.dtype), of_mask[id(mask)], turns))
            of_mask[id(mask)].turn_pairs(layer, turns)
        self.rings = list(of_mask.values())
        self.final_norm = _norm(model.final_norm, self.dtype)
        self.head, self.cap = _Matrix(model.head.weight, None, batch), model.final_cap

    def __call__(self, ids: Tensor) -> Tensor:
        position = self.length
        self.length += 1
        x = F.embedding(ids, self.table).to(self.dtype)  # (B, C)
        if self.codes is not None:
            x = x + self.codes[position]
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.smear is not None and self.before is not None:
            x, self.before = torch.addcmul(x, self.smear, self.before), x
        for turns in self.turns:
            turns.go_to(position)
        for ring in self.rings:
            ring.go_to(position)
        for layer, ring, turns in self.layers:
            x = layer(x, ids, turns.now, *next(ring.rows))
        logits = self.head(self.final_norm(x)).to(self.dtype)  # (B, V)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class _Layer:
    def __init__(self, block: Block, turns: _Turns, batch: int, dtype: torch.dtype) -> None:
        attention = block.attention
        projections = cast(Separate, attention.projections)
        h, g = projections.n_head, projections.n_kv_head
        d = attention.out.in_features // h
        order = turns.order(d, (h + g) * d)
        weight, bias = projections.qkv.weight, projections.qkv.bias
        both = torch.cat((order, torch.arange((h + g) * d, (h + 2 * g) * d, device=order.device)))
        self.norm = _norm(block.attention_norm, dtype)
        self.qkv = _Matrix(weight[both], None if bias is None else bias[both], batch)
        self.row = torch.zeros(batch, (h + 2 * g) * d, dtype=dtype, device=weight.device)
        heads = self.row.view(batch, h + 2 * g, d)
        self.qk, self.v = heads[:, : h + g], heads[:, h + g :]
        self.kv = heads[:, h:].unflatten(1, (2, g)).transpose(0, 1)  # (2, B, G, D)
        self.pairs = torch.view_as_complex(self.qk.unflatten(-1, (-1, 2)))  # (B, H + G, D/2)
        # The queries of a group are rows of one product; those of several samples do not lie evenly and are copied.
        self.asked = heads[:, :h]
        q = self.asked if batch == 1 else torch.empty(batch, h, d, dtype=dtype, device=weight.device)
        self.copied = None if batch == 1 else q
        self.q = q.reshape(batch * g, h // g, d)
        self.read = torch.empty_like(self.q)
        self.read_row = self.read.view(batch, h * d)
        self.nothing = self.q.new_zeros(1, 1, 1)
        self.scale = cast(float, attention.scale(Visibility(1)))
        self.qk_norm = None
        if isinstance(attention.q_norm, nn.RMSNorm):
            gain = None
            if attention.q_norm.weight is not None:
                q_gain, k_gain = (w.to(dtype) for w in (attention.q_norm.weight, attention.k_norm.weight))
                gain = torch.cat((q_gain.repeat(h), k_gain.repeat(g)))[order].view(h + g, d)
            self.qk_norm = _rms(d, attention.q_norm.eps, gain, self.row)
        self.values = None
        if block.value is not None:
            gains = block.value.gain.repeat_interleave(d)
            self.values = (block.value.table.weight * gains).to(dtype)  # (V, G·D)
        self.out = _Matrix(attention.out.weight, attention.out.bias, batch)
        self.mlp = None
        if block.mlp is not None and block.mlp_norm is not None:
            self.mlp_norm, self.mlp = _norm(block.mlp_norm, dtype), block.mlp.kind
            first = [block.mlp.up] if block.mlp.gate is None else [block.mlp.gate, block.mlp.up]
            biases = None if block.mlp.up.bias is None else torch.cat([linear.bias for linear in first])
            self.up = _Matrix(torch.cat([linear.weight for linear in first]), biases, batch)
            self.down = _Matrix(block.mlp.down.weight, block.mlp.down.bias, batch)

    def __call__(
        self, x: Tensor, ids: Tensor, turn: Tensor | None, new: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """x (B, C); new (2, B, G, D): where this token's key and value go; keys (B·G, D, S); values (B·G, S, D)."""
        self.qkv.into(self.row, self.norm(x))
        if self.values is not None:
            self.v.add_(F.embedding(ids, self.values).view_as(self.v))
        if self.qk_norm is not None:
            self.qk.copy_(self.qk_norm(self.qk))
        if turn is not None:
            self.pairs.mul_(turn)
        new.copy_(self.kv)
        if self.copied is not None:
            self.copied.copy_(self.asked)
        scores = torch.baddbmm(self.nothing, self.q, keys, beta=0, alpha=self.scale)  # (B·G, H/G, S)
        torch.bmm(scores.softmax(-1), values, out=self.read)
        x = self.out.onto(x, self.read_row)
        return x if self.mlp is None else self.down.onto(x, self._active(self.up(self.mlp_norm(x))))

    def _active(self, h: Tensor) -> Tensor:
        if self.mlp == "relu2":
            return h.relu_().mul_(h)
        if self.mlp == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(h, approximate="tanh" if self.mlp == "gelu_tanh" else "none")


class _Matrix:
    """x -> x Wᵀ + b for a few rows x, in the precision of the weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, batch: int) -> None:
        weight, self.bias, self.dtype = weight.detach(), None if bias is None else bias.detach(), weight.dtype
        rows, columns = weight.shape
        # Read along the longer side.
        self.weight = weight.t().contiguous() if rows >= columns else weight.contiguous().t()  # (in, out)
        self.half, self.packed = weight.dtype.itemsize == 2, None
        large = weight.dtype == torch.float32 and batch > 1 and weight.numel() >= PACK_FROM
        if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            if large or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
                self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), batch)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def into(self, row: Tensor, x: Tensor) -> None:
        """The same, written to `row`."""
        if self.half or self.packed is not None:
            row.copy_(self(x))
        elif self.bias is None:
            torch.mm(x, self.weight, out=row)
        else:
            torch.addmm(self.bias, x, self.weight, out=row)

    def onto(self, stream: Tensor, x: Tensor) -> Tensor:
        """The same, added to `stream`."""
        if self.half or self.packed is not None:
            return stream.add_(self(x))
        return (stream if self.bias is None else stream.add_(self.bias)).addmm_(x, self.weight)


class _Ring:
    """Keys and values of all layers that share a mask: one slot per token that can be read, the oldest overwritten.

    Behind a softmax the order of keys is nobody's business, so nothing is ever moved.
    """

    def __init__(
        self, cache: KVCache, layers: list[int], window: int, sinks: int, room: int, dtype: torch.dtype
    ) -> None:
        held = [cache.streams(layer) for layer in layers]
        b, g, _, d = held[0]["k"].shape
        self.layers, self.window, self.sinks, self.size = layers, window, sinks, min(window + sinks, room)
        self.store = held[0]["k"].new_zeros(len(layers), 2, b, g, self.size, d, dtype=dtype)
        past = cache.past(layers[0])
        first = cache.length - past  # of the tokens that are not sinks, the first that the cache still has
        slots = [self._slot(i if i < sinks else i + first) for i in range(past)]
        for index, (layer, streams) in enumerate(zip(layers, held, strict=True)):
            for which, name in enumerate(("k", "v")):
                rows = cache.extend(layer, name, streams[name][..., :0, :])  # (B, G, past, D)
                self.store[index, which][:, :, slots] = rows.to(dtype)
        flat = self.store.view(len(layers), 2, b * g, self.size, d)
        self.keys, self.values = flat[:, 0].transpose(-1, -2), flat[:, 1]
        self.n, self.seen = 0, list[tuple[Tensor, Tensor]]()
        self.rows: Iterator[tuple[Tensor, Tensor, Tensor]] = iter(())

    def turn_pairs(self, layer: int, turns: _Turns) -> None:
        """Components of the layer's keys in the order that its plan has them in."""
        keys = self.store[self.layers.index(layer), 0]
        keys.copy_(keys[..., turns.order(keys.shape[-1], keys.shape[-1])])

    def _slot(self, position: int) -> int:
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.window

    def go_to(self, position: int) -> None:
        """rows: for each layer where the token at this position goes, and the keys and values it reads."""
        n = min(position + 1, self.size)
        if n != self.n:
            self.n = n
            keys, values = self.keys[..., :n].unbind(), self.values[:, :, :n].unbind()
            self.seen = list(zip(keys, values, strict=True))
        new = self.store.select(-2, self._slot(position)).unbind()
        self.rows = ((slot, *both) for slot, both in zip(new, self.seen, strict=True))


class _Turns:
    """e^(i·angle) of every pair of components at the current position; `now` is None where nothing turns.

    The two halves of a turned head are its pairs. Queries and keys are laid out with pairs side by side, as complex
    numbers, so that turning is one product: q·k does not depend on the order of components.
    """

    def __init__(self, position: Position, dtype: torch.dtype, device: torch.device) -> None:
        self.position, self.dtype, self.device = position, dtype, device
        first = position.rotation(range(1))
        self.half = 0 if first is None else first.cos.shape[-1]
        self.start, self.table, self.now = 0, None, None
        self.d = 0

    def order(self, d: int, width: int) -> Tensor:
        """(width,) int64, for heads of `d`: which component stands where."""
        self.d = d
        half, start = self.half, torch.arange(0, width, d, device=self.device)
        turned = torch.arange(2 * half, device=self.device).view(2, half).t().flatten()
        head = torch.cat((turned, torch.arange(2 * half, d, device=self.device)))
        return (start[:, None] + head).flatten()

    def go_to(self, position: int) -> None:
        if not self.half:
            return
        if self.table is None or position >= self.start + TURNS:
            self.start = position
            rotation = self.position.rotation(range(position, position + TURNS))
            assert rotation is not None
            pairs = torch.complex(rotation.cos.to(self.dtype), rotation.sin.to(self.dtype))
            self.table = F.pad(pairs, (0, self.d // 2 - self.half), value=1.0)  # the rest of a head does not turn
        self.now = self.table[position - self.start]


def _norm(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    gain, bias = (None if p is None else p.detach().to(dtype) for p in (module.weight, getattr(module, "bias", None)))
    if isinstance(module, nn.LayerNorm):
        shape, eps = module.normalized_shape, module.eps
        return lambda x: torch.layer_norm(x, shape, gain, bias, eps)
    assert isinstance(module, nn.RMSNorm)
    return _rms(module.normalized_shape[0], module.eps, gain, torch.empty(0, dtype=dtype))


def _rms(width: int, eps: float | None, gain: Tensor | None, like: Tensor) -> Callable[[Tensor], Tensor]:
    """x / √(mean(x²) + eps): four operations where torch's own, on a CPU, is eight."""
    least = like.new_full((1,), torch.finfo(like.dtype).eps if eps is None else eps)

    def norm(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * torch.addcmul(least, length, length, value=1 / width).rsqrt_()
        return x if gain is None else x * gain

    return norm
