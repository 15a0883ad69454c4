"""softmax(s) v tile by tile, forward and backward, without ever holding more than one tile of s.

For each block of queries, over its tiles of keys, with m the largest score so far (Milakov & Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4):

    m' = max(m, max_j s_j)      l ← l · e^(m − m') + Σ_j e^(s_j − m')      y ← y · e^(m − m') + Σ_j e^(s_j − m') v_j

and y / l at the end. Kept for the backward pass: q, k, v, y, m, l. It makes the scores again, and with dP = dy vᵀ,

    P = e^(s − m) / l      Δ = Σ_d dy · y      dS = P (dP − Δ)      dq = dS k      dk = dSᵀ q      dv = Pᵀ dy

Powers are of 2, of scores times log₂ e: on CPUs torch's exp2 takes a third of the time of its exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.bias_gradient import BiasGradient
from softattn_lm.attention.tiles import Tile, of_rows, plan
from softattn_lm.attention.visibility import Visibility

LOG2E = math.log2(math.e)
# 0 or −∞ as integers: see `_hide`.
_INTEGERS = {torch.float32: (torch.int32, -(2**23)), torch.float64: (torch.int64, -(2**52))}


@dataclass(frozen=True)
class Settings:
    """What does not change between tiles. dropout: 0 outside training; seed: of its noise."""

    scale: float
    visible: Visibility
    soft_cap: float | None
    bias: Bias | None
    bias_tensors: tuple[str, ...]
    dropout: float
    seed: int
    query_block: int
    key_block: int
    rows: int  # of the batch, at once


@dataclass
class _Work:
    """One block of queries of some rows of the batch: n rows, G groups of r heads each, t queries."""

    index: int
    rows: slice
    flat: slice  # the same in (B · G)
    queries: slice
    tiles: list[Tile]
    q: Tensor  # (n·G, r·t, D), times what makes scores of it


class TiledAttention(torch.autograd.Function):
    """(B, H, T, D), (B, G, S, D), (B, G, S, D), sink (H,) or None, the tensors of the bias -> y (B, H, T, D)."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *bias: Tensor
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            y, peak, norm = _Tiles(settings, q, k, v).forward(sink)
        ctx.settings, ctx.n_bias = settings, len(bias)
        ctx.save_for_backward(q, k, v, y, peak, norm, sink, *bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, peak, norm, sink, *bias = ctx.saved_tensors
        settings: Settings = ctx.settings
        collected = None
        if settings.bias is not None and bias:
            collected = BiasGradient(settings.bias, dict(zip(settings.bias_tensors, bias, strict=True)))
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv, dsink = _Tiles(settings, q, k, v).backward(dy, y, peak, norm, sink, collected)
        return None, dq, dk, dv, dsink, *([] if collected is None else collected.sums)


class _Tiles:
    """The loops. Sums are in float32 or better, whatever q, k and v are."""

    def __init__(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.settings = settings
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        (self.b, self.h, self.t, self.d), (self.g, self.s) = q.shape, k.shape[1:3]
        self.q, self.k, self.v = q, self._flat(k), self._flat(v)
        cap = settings.soft_cap
        # What makes scores of q kᵀ: powers of 2 want s · log₂ e, and the cap wants 2 s / c.
        self.factor = settings.scale * (LOG2E if cap is None else 2.0 / cap)
        most = settings.rows * self.h * settings.query_block * settings.key_block
        self._buffers = [q.new_empty(0, dtype=self.dtype) for _ in range(3)]
        self._most = min(most, self.b * self.h * self.t * self.s)
        self._mask: tuple[tuple[int, int, int], tuple[Tensor, Tensor]] | None = None

    def forward(self, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """y, and (B, H, T, 1) each the largest score of a row and one over its sum, 0 if it reads nothing."""
        y = torch.empty_like(self.q)
        peak, norm = (self.q.new_empty(self.b, self.h, self.t, 1, dtype=self.dtype) for _ in range(2))
        for work, visible in self._work():
            n_rows = work.q.shape[:2]
            m = self._sink_rows(sink, work) if sink is not None else work.q.new_full((*n_rows, 1), -torch.inf)
            total = torch.full_like(m, 0.0 if sink is None else 1.0)
            safe = m
            sums = torch.zeros_like(work.q)
            for number, tile in enumerate(work.tiles):
                p, _ = self._scores(work, tile, visible, slopes=False)
                above = torch.maximum(m, p.amax(-1, keepdim=True))
                # −∞ − (−∞) is no number: a row that has seen no key yet counts from 0.
                safe = above.masked_fill(above == -torch.inf, 0.0)
                p.sub_(safe).exp2_()
                shrink = torch.exp2(m - safe)
                total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                if self.settings.dropout:
                    p.mul_(self._kept(work, number, p.shape))
                sums.mul_(shrink).baddbmm_(p, self.v[work.flat, tile.keys])
                m = above
            inverse = torch.where(total == 0, total, 1 / total)
            y[work.rows, :, work.queries] = self._heads(sums.mul_(inverse), work)
            peak[work.rows, :, work.queries] = self._heads(safe, work)
            norm[work.rows, :, work.queries] = self._heads(inverse, work)
        return y, peak, norm

    def backward(
        self, dy: Tensor, y: Tensor, peak: Tensor, norm: Tensor, sink: Tensor | None, bias: BiasGradient | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dq = torch.empty_like(self.q)
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        dsink = None if sink is None else torch.zeros_like(sink, dtype=self.dtype)
        for work, visible in self._work():
            m, inverse = self._block(peak, work), self._block(norm, work)
            dy_block = self._block(dy, work).mul_(inverse)  # P stays without its 1/l, which dy brings along
            delta = (dy_block * self._block(y, work)).sum(-1, keepdim=True)
            if sink is not None and dsink is not None:
                lost = torch.exp2(self._sink_rows(sink, work) - m) * delta
                dsink -= self._heads(lost, work).sum((0, 2, 3))
            sums = torch.zeros_like(work.q)
            for number, tile in enumerate(work.tiles):
                p, slope = self._scores(work, tile, visible, slopes=True)
                p.sub_(m).exp2_()
                ds = self._buffer(1, p.shape)
                torch.bmm(dy_block, self.v[work.flat, tile.keys].mT, out=ds)
                read = p
                if self.settings.dropout:
                    kept = self._kept(work, number, p.shape)
                    read = p * kept
                    ds.mul_(kept)
                dv[work.flat, tile.keys] += torch.bmm(read.mT, dy_block)
                ds.sub_(delta).mul_(p)
                if bias is not None:
                    bias.add(work.queries, tile.keys, self._heads(ds, work).sum(0))
                if slope is not None:
                    ds.mul_(slope)
                sums.baddbmm_(ds, self.k[work.flat, tile.keys])
                dk[work.flat, tile.keys] += torch.bmm(ds.mT, work.q)
            dq[work.rows, :, work.queries] = self._heads(sums.mul_(self.settings.scale), work)
        dk *= self.settings.scale / self.factor
        shape = (self.b, self.g, self.s, self.d)
        return dq, dk.view(shape), dv.view(shape), dsink

    # -- one tile -----------------------------------------------------------------------------------------------------

    def _scores(self, work: _Work, tile: Tile, visible: Visibility, slopes: bool) -> tuple[Tensor, Tensor | None]:
        """s · log₂ e, (n·G, r·t, s), and with a soft cap, if asked for, the slope of the cap, 1 − tanh²."""
        keys = self.k[work.flat, tile.keys]
        scores = self._buffer(0, (*work.q.shape[:2], keys.shape[1]))
        torch.bmm(work.q, keys.mT, out=scores)
        slope = None
        if self.settings.soft_cap is not None:
            scratch = self._buffer(2, scores.shape)
            _tanh_of_half(scores, scratch)
            if slopes:
                slope = torch.mul(scores, scores, out=scratch).neg_().add_(1.0)
            scores.mul_(self.settings.soft_cap * LOG2E)
        if self.settings.bias is not None:
            added = self.settings.bias.tile(work.queries, tile.keys).to(self.dtype) * LOG2E  # (H, t, s)
            self._heads(scores, work).add_(added)
        if tile.partial:
            self._hide(self._heads(scores, work), work.queries, tile.keys, visible)
        return scores, slope

    def _hide(self, scores: Tensor, queries: slice, keys: slice, visible: Visibility) -> None:
        """Hidden scores become −∞, whatever they were: the bits of a NaN are cleared before −∞ is added.

        masked_fill_ says the same in one word and takes twenty times as long on a CPU.
        """
        integer, infinity = _INTEGERS[self.dtype]
        # Tiles at the same place relative to the diagonal share a mask.
        place = (queries.start - keys.start, queries.stop - queries.start, keys.stop - keys.start)
        if self._mask is None or self._mask[0] != place or visible.documents is not None or visible.sinks:
            keep = visible.tile(queries, keys).to(integer).neg_()  # all bits, or none
            self._mask = place, (keep, keep.bitwise_not().bitwise_and_(infinity).view(self.dtype))
        keep, added = self._mask[1]
        scores.view(integer).bitwise_and_(keep)
        scores.add_(added)

    def _kept(self, work: _Work, number: int, shape: torch.Size) -> Tensor:
        """0 or 1/(1 − p) per weight: the same in both passes, since each tile has a seed of its own."""
        seed = (self.settings.seed + (work.index << 20) + number) % 2**63
        generator = torch.Generator(self.q.device).manual_seed(seed)
        noise = torch.empty(shape, dtype=torch.int32, device=self.q.device).random_(generator=generator)
        return (noise >= self.settings.dropout * 2**31).to(self.dtype).div_(1.0 - self.settings.dropout)

    # -- blocks and shapes --------------------------------------------------------------------------------------------

    def _work(self) -> Iterator[tuple[_Work, Visibility]]:
        settings, index = self.settings, 0
        for first in range(0, self.b, settings.rows):
            rows = slice(first, min(first + settings.rows, self.b))
            visible = of_rows(settings.visible, rows)
            flat = slice(rows.start * self.g, rows.stop * self.g)
            for block in plan(visible, settings.query_block, settings.key_block):
                work = _Work(index, rows, flat, block.queries, block.tiles, self.q)
                work.q = self._block(self.q, work).mul_(self.factor)
                yield work, visible
                index += 1

    def _block(self, x: Tensor, work: _Work) -> Tensor:
        """(B, H, T, E) -> a copy of the block, (n·G, r·t, E): heads that share keys follow each other."""
        part = x[work.rows, :, work.queries]
        copy = torch.empty(part.shape, dtype=self.dtype, device=x.device).copy_(part)
        return copy.view(part.shape[0] * self.g, -1, x.shape[-1])

    def _heads(self, x: Tensor, work: _Work) -> Tensor:
        """(n·G, r·t, E) -> a view (n, H, t, E)."""
        return x.view(work.rows.stop - work.rows.start, self.h, work.queries.stop - work.queries.start, x.shape[-1])

    def _sink_rows(self, sink: Tensor, work: _Work) -> Tensor:
        """(H,) -> (n·G, r·t, 1), times log₂ e."""
        n, t = work.rows.stop - work.rows.start, work.queries.stop - work.queries.start
        column = (sink.to(self.dtype) * LOG2E)[None, :, None, None].expand(n, self.h, t, 1)
        return column.reshape(n * self.g, -1, 1)

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[2:]).to(self.dtype)

    def _buffer(self, which: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Room for one tile, allocated once: fresh memory for each tile would cost more than the arithmetic on it."""
        if not self._buffers[which].numel():
            self._buffers[which] = self.q.new_empty(self._most, dtype=self.dtype)
        return self._buffers[which][: math.prod(shape)].view(shape)


def _tanh_of_half(x: Tensor, scratch: Tensor) -> None:
    """tanh(x/2) in place, as (e^x − 1) / (e^x + 1): as precise as torch's tanh and twice as fast on a CPU."""
    x.clamp_(max=40.0)  # tanh(20) is 1 in float64 as well, and e^x must stay finite
    x.expm1_()
    torch.div(x, torch.add(x, 2.0, out=scratch), out=x)
