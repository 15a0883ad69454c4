"""What decoding remembers: named streams per layer, one length for all, and memory that does not grow."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from softattn_lm.errors import UserError

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
        if rows.shape[0] != new.shape[0]:
            raise UserError(
                f"the cache holds a batch of {rows.shape[0]} and got {new.shape[0]}; make a new one with "
                "model.new_cache()"
            )
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

    `fixed` holds what has the size of a state and not of a sequence, such as the last embedding.
    """

    def __init__(self, keep: Sequence[Keep]) -> None:
        self.length = 0  # tokens seen so far = position of the next token
        self.fixed: dict[str, Tensor] = {}
        self._layers = [_Rolling(k) for k in keep]

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

    def advance(self, new: int) -> None:
        """Called once per forward pass, after the last layer has read."""
        for layer in self._layers:
            layer.end += new
        self.length += new

    def nbytes(self) -> int:
        """Bytes of everything held, as allocated."""
        held = [rows for layer in self._layers for rows in (*layer.streams.values(), *layer.sinks.values())]
        return sum(rows.numel() * rows.element_size() for rows in [*held, *self.fixed.values()])

    def bytes_per_token(self) -> int:
        """What one more remembered token costs for one sequence, over all layers."""
        held = [rows for layer in self._layers for rows in layer.streams.values()]
        return sum(rows[:1, ..., :1, :].numel() * rows.element_size() for rows in held)


def expand_groups(x: Tensor, n_head: int) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): head h reads group h // (H / G), neighbours together, as torch and Llama count."""
    return x if x.shape[1] == n_head else torch.repeat_interleave(x, n_head // x.shape[1], dim=1)
