"""What decoding remembers: named streams per layer, one length for all, and memory that does not grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from softattn_lm.errors import UserError

if TYPE_CHECKING:
    from softattn_lm.attention.kernel import State

# Room behind the kept keys: a full buffer is moved to its front once per so many tokens instead of at every token.
SLACK = 256


@dataclass(frozen=True)
class Keep:
    """How much of the past a layer may still read: the first `sinks` tokens and the last `recent` ones."""

    recent: int
    sinks: int = 0


@dataclass
class _Rolling:
    """The streams of one layer: rows [end − past, end) of each buffer are what can still be read, in order."""

    keep: Keep
    end: int = 0
    capacity: int = 0
    streams: dict[str, Tensor] = field(default_factory=dict)
    sinks: dict[str, Tensor] = field(default_factory=dict)

    def past(self, length: int) -> int:
        return min(length, self.keep.recent + self.keep.sinks)

    def reserve(self, new: int, length: int) -> None:
        if self.end + new > self.capacity:
            past = self.past(length)
            most = self.keep.recent + self.keep.sinks
            capacity = max(self.capacity, most + max(new, min(most, SLACK)))
            for name, rows in self.streams.items():
                kept = rows[..., self.end - past : self.end, :].clone()
                if capacity > self.capacity:
                    self.streams[name] = rows.new_empty((*rows.shape[:-2], capacity, rows.shape[-1]))
                self.streams[name][..., :past, :] = kept
            self.end, self.capacity = past, capacity

    def extend(self, name: str, new: Tensor, length: int) -> Tensor:
        count = new.shape[-2]
        if name not in self.streams:
            assert length == 0, f"stream {name} starts at token {length}"
            self.streams[name] = new.new_empty((*new.shape[:-2], self.capacity, new.shape[-1]))
        rows, past = self.streams[name], self.past(length)
        _same_batch(rows, new.shape[0])
        if self.keep.sinks:
            self._sinks(name, rows, new, length, past)
        rows[..., self.end : self.end + count, :] = new
        return rows[..., self.end - past : self.end + count, :]

    def _sinks(self, name: str, rows: Tensor, new: Tensor, length: int, past: int) -> None:
        # The window slides away from the first tokens: they are laid over the rows that it has just left behind.
        if length < self.keep.sinks:
            first = new[..., : self.keep.sinks - length, :]
            held = self.sinks.get(name)
            self.sinks[name] = first.clone() if held is None else torch.cat((held, first), dim=-2)
        if length > past:
            rows[..., self.end - past : self.end - past + self.keep.sinks, :] = self.sinks[name]


class KVCache:
    """Per layer the last tokens of each stream, contiguous and in order, behind the sinks if there are any.

    A window of W keys needs W − 1 past ones, since a query reads itself. `extend` writes the new rows behind the kept
    ones and answers with a view of both. The model calls `reserve` before the first layer and `advance` after the last,
    so that all layers see the same past.

    Beside the streams it holds what does not grow with the text: `fixed`, such as the last embedding, and the states of
    recurrent layers, which have no streams.
    """

    def __init__(self, keep: Sequence[Keep]) -> None:
        self.length = 0  # tokens seen so far = position of the next token
        self.fixed: dict[str, Tensor] = {}
        self._layers = [_Rolling(k) for k in keep]
        self._states: dict[int, State] = {}

    def past(self, layer: int) -> int:
        """How many earlier tokens the next query of this layer can still read."""
        return self._layers[layer].past(self.length)

    def reserve(self, new: int) -> None:
        """Make room for `new` rows in every stream: moves kept rows to the front, and grows only for a longer chunk."""
        for layer in self._layers:
            layer.reserve(new, self.length)

    def extend(self, layer: int, name: str, new: Tensor) -> Tensor:
        """(B, G, T, E) -> (B, G, past + T, E): the rows the new queries may read, in order. Needs `reserve` before."""
        return self._layers[layer].extend(name, new, self.length)

    def streams(self, layer: int) -> dict[str, Tensor]:
        """Of each stream of a layer its rows (B, G, capacity, E), as allocated."""
        return dict(self._layers[layer].streams)

    def state(self, layer: int, batch: int) -> State | None:
        """What a recurrent layer has made of all earlier tokens; None before the first. Raises UserError for another
        batch.
        """
        state = self._states.get(layer)
        for held in (state or {}).values():
            _same_batch(held, batch)
        return state

    def remember_state(self, layer: int, state: State) -> None:
        """In the place of the one before."""
        self._states[layer] = state

    def advance(self, new: int) -> None:
        """Called once per forward pass, after the last layer has read."""
        for layer in self._layers:
            layer.end += new
        self.length += new

    def nbytes(self) -> int:
        """Bytes of everything held, as allocated."""
        held = [rows for layer in self._layers for rows in (*layer.streams.values(), *layer.sinks.values())]
        return sum(_bytes(rows) for rows in (*held, *self._constant()))

    def bytes_per_token(self) -> int:
        """What one more remembered token costs for one sequence, over all layers."""
        return sum(_bytes(rows[:1, ..., :1, :]) for layer in self._layers for rows in layer.streams.values())

    def state_bytes(self) -> int:
        """What is held for one sequence however long it is, over all layers."""
        return sum(_bytes(held[:1]) for held in self._constant())

    def _constant(self) -> list[Tensor]:
        return [*self.fixed.values(), *(held for state in self._states.values() for held in state.values())]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _same_batch(held: Tensor, batch: int) -> None:
    if held.shape[0] != batch:
        raise UserError(
            f"the cache holds a batch of {held.shape[0]} and got {batch}; make a new one with model.new_cache()"
        )


def behind(x: Tensor, count: int, name: str, cache: KVCache | None) -> Tensor:
    """(B, ..., T, E) -> (B, ..., count + T, E): behind the last `count` rows that earlier calls gave under this name, 0
    before the first.
    """
    before = None if cache is None else cache.fixed.get(name)
    if before is not None:
        _same_batch(before, x.shape[0])
    rows = F.pad(x, (0, 0, count, 0)) if before is None else torch.cat((before, x), dim=-2)
    if cache is not None:
        cache.fixed[name] = rows[..., rows.shape[-2] - count :, :].clone()
    return rows


def expand_groups(x: Tensor, n_head: int) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): head h reads group h // (H / G), neighbours together, as torch and Llama count."""
    return x if x.shape[1] == n_head else torch.repeat_interleave(x, n_head // x.shape[1], dim=1)
