"""Keys and values of one token per step: where they go, what is read, and how far they turn."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from softattn_lm.attention.cache import KVCache
from softattn_lm.position.base import Position

STEP = 32  # slots that are laid out at once, at least
TURNS = 256  # positions whose angles are computed at once


class Ring:
    """Keys and values of all layers that share a mask: one slot per token that can be read, the oldest overwritten.

    Behind a softmax the order of keys is nobody's business, so a token keeps its slot. All slots that are laid out are
    read, in one run of memory: behind a gap after the keys of each head the processor's prefetching starts anew, which
    costs more than reading a few empty slots. More slots are laid out as the text grows.
    """

    def __init__(
        self, cache: KVCache, layers: list[int], window: int, sinks: int, batch: int, room: int, dtype: torch.dtype
    ) -> None:
        held = [cache.streams(layer) for layer in layers]
        _, g, _, d = held[0]["k"].shape
        self.shape = batch, g, d
        self.layers, self.window, self.sinks, self.size = layers, window, sinks, min(window + sinks, room)
        self.memory = held[0]["k"].new_zeros(len(layers), 2, batch * g * self.size * d, dtype=dtype)
        self.empty = self.memory.new_full((1, 1, self.size), -torch.inf)  # added to scores: 0 where a slot is taken
        past = cache.past(layers[0])
        self._lay_out(min(self.size, past + STEP))
        first = cache.length - past  # of the tokens that are not sinks, the first that the cache still has
        slots = [self._slot(i if i < sinks else i + first) for i in range(past)]
        self.empty[..., : cache.length] = 0
        for index, (layer, streams) in enumerate(zip(layers, held, strict=True)):
            for which, name in enumerate(("k", "v")):
                rows = cache.extend(layer, name, streams[name][..., :0, :])  # (B or 1, G, past, D)
                self.store[index, which][:, :, slots] = rows.to(dtype)
        self.rows: Iterator[tuple[Tensor, Tensor, Tensor]] = iter(())

    def turn_pairs(self, layer: int, turns: Turns) -> None:
        """Components of the layer's keys in the order that its plan has them in."""
        if not turns.half:
            return
        keys = self.store[self.layers.index(layer), 0]
        keys.copy_(keys[..., turns.order(keys.shape[-1], keys.shape[-1])])

    def go_to(self, position: int) -> None:
        """rows: for each layer where the token at this position goes, and the keys and values it reads."""
        slot = self._slot(position)
        if slot >= self.slots:
            self._grow()
        if position < self.size:
            self.unseen.select(-1, slot).zero_()
        new = self.store.select(-2, slot).unbind()
        self.rows = ((here, *both) for here, both in zip(new, self.seen, strict=True))

    def _slot(self, position: int) -> int:
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.window

    def _lay_out(self, slots: int) -> None:
        """Of each stream the first `slots` of every head, without a gap."""
        b, g, d = self.shape
        self.slots, self.unseen = slots, self.empty[..., :slots]
        self.store = self.memory[..., : b * g * slots * d].unflatten(-1, (b, g, slots, d))
        flat = self.store.flatten(2, 3)
        self.seen = list(zip(flat[:, 0].transpose(-1, -2).unbind(), flat[:, 1].unbind(), strict=True))

    def _grow(self) -> None:
        before, taken = self.store.flatten(0, 1), self.slots
        self._lay_out(min(self.size, taken + max(STEP, taken // 8)))
        apart = torch.empty_like(before[0])
        for old, new in zip(before, self.store.flatten(0, 1), strict=True):
            new[..., :taken, :] = apart.copy_(old)  # they overlap
            new[..., taken:, :].zero_()


class Turns:
    """e^(i·angle) of every pair of components at the current position; `now` is None where nothing turns.

    The two halves of a turned head are its pairs. Queries and keys are laid out with pairs side by side, as complex
    numbers, so that turning is one product: q·k does not depend on the order of components.
    """

    def __init__(self, position: Position, dtype: torch.dtype, device: torch.device) -> None:
        self.position, self.dtype, self.device = position, dtype, device
        first = position.rotation(range(1))
        self.half = 0 if first is None else first.cos.shape[-1]
        self.start, self.d = 0, 0
        self.table: Tensor | None = None
        self.now: Tensor | None = None

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
