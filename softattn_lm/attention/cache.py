"""What decoding remembers: named streams per layer, one length for all of them, and memory that does not grow."""

import torch
from torch import Tensor

from softattn_lm.errors import UserError

# Room behind the kept keys: a full buffer is moved to its front once per so many tokens instead of at every token.
SLACK = 256


class KVCache:
    """The last `keep` tokens of each stream, contiguous and in order.

    A window of W keys needs keep = W − 1 past ones, since a query reads itself. A stream is a buffer of keep + slack
    rows; `extend` writes the new rows behind the kept ones and answers with a view of both. The model calls `reserve`
    before the first layer and `advance` after the last, so that all layers see the same past.

    `fixed` holds what has the size of a state and not of a sequence, such as the last embedding.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.length = 0  # tokens seen so far = position of the next token
        self.fixed: dict[str, Tensor] = {}
        self._streams: dict[tuple[int, str], Tensor] = {}
        self._end = 0  # row behind the last kept token
        self._capacity = 0

    @property
    def past(self) -> int:
        """How many earlier tokens the next query can still read."""
        return min(self.length, self.keep)

    def reserve(self, new: int) -> None:
        """Make room for `new` rows in every stream: moves kept rows to the front, and grows only for a longer chunk."""
        if self._end + new <= self._capacity:
            return
        first = self._end - self.past
        capacity = max(self._capacity, self.keep + max(new, min(self.keep, SLACK)))
        for name, rows in self._streams.items():
            kept = rows[..., first : self._end, :].clone()
            if capacity > self._capacity:
                self._streams[name] = rows.new_empty((*rows.shape[:-2], capacity, rows.shape[-1]))
            self._streams[name][..., : self.past, :] = kept
        self._end, self._capacity = self.past, capacity

    def extend(self, layer: int, name: str, new: Tensor) -> Tensor:
        """(B, G, T, E) -> (B, G, past + T, E): the rows the new queries may read, in order. Needs `reserve` before."""
        key = (layer, name)
        if key not in self._streams:
            assert self.length == 0, f"stream {key} starts at token {self.length}"
            self._streams[key] = new.new_empty((*new.shape[:-2], self._capacity, new.shape[-1]))
        rows = self._streams[key]
        if rows.shape[0] != new.shape[0]:
            raise UserError(f"the cache holds a batch of {rows.shape[0]} and got {new.shape[0]}; make a new one with model.new_cache()")
        end = self._end + new.shape[-2]
        rows[..., self._end : end, :] = new
        return rows[..., self._end - self.past : end, :]

    def advance(self, new: int) -> None:
        """Called once per forward pass, after the last layer has read."""
        self._end += new
        self.length += new

    def nbytes(self) -> int:
        """Bytes of all streams as allocated, and of the fixed states."""
        held = [*self._streams.values(), *self.fixed.values()]
        return sum(rows.numel() * rows.element_size() for rows in held)

    def bytes_per_token(self) -> int:
        """What one more remembered token costs, over all layers."""
        return sum(rows[..., :1, :].numel() * rows.element_size() for rows in self._streams.values())


def expand_groups(x: Tensor, n_head: int) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): head h reads group h // (H / G), neighbours together, as torch and Llama count."""
    return x if x.shape[1] == n_head else torch.repeat_interleave(x, n_head // x.shape[1], dim=1)
