"""Which tiles of the (T, S) matrix have to be computed at all, and which of those need a mask.

keys ->        one letter per tile of a causal mask, a window, and a window behind sinks
p .  .  .      p .  .  .      p .  .  .
f p  .  .      p p  .  .      p p  .  .       p partial: needs the mask        f full: needs none
f f  p  .      .  p p  .      f p  p  .       . nobody reads it: never computed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from softattn_lm.attention.visibility import Visibility


@dataclass(frozen=True)
class Tile:
    """`keys` that some query of a block reads. partial: not all of its queries read all of them."""

    keys: slice
    partial: bool


@dataclass(frozen=True)
class QueryBlock:
    queries: slice
    tiles: list[Tile]


def of_rows(visible: Visibility, rows: slice) -> Visibility:
    """The same for some rows of the batch."""
    if visible.documents is None:
        return visible
    places = None if visible.places is None else visible.places[rows]
    return replace(visible, documents=visible.documents[rows], places=places)


def plan(visible: Visibility, query_block: int, key_block: int) -> list[QueryBlock]:
    """Every tile that anybody reads, in blocks of at most so many queries and keys.

    The extent of documents is looked at per tile and in host memory, which costs one transfer per call on a GPU.
    """
    documents = None if visible.documents is None else _Documents(visible)
    blocks = []
    for first in range(0, visible.new, query_block):
        queries = slice(first, min(first + query_block, visible.new))
        tiles = []
        for keys in _reachable(visible, queries, key_block):
            partial = _cut(visible, queries, keys)
            if documents is not None:
                if not documents.meet(queries, keys):
                    continue
                partial = partial or not documents.same(queries, keys)
            tiles.append(Tile(keys, partial))
        blocks.append(QueryBlock(queries, tiles))
    return blocks


def _reachable(visible: Visibility, queries: slice, key_block: int) -> Iterator[slice]:
    """Stretches of keys that window and order leave to a block of queries, cut into equal parts."""
    low, high = 0, visible.past + queries.stop
    if visible.cuts and visible.window is not None:
        low = max(0, visible.past + queries.start - visible.window + 1)
        if visible.sinks and visible.documents is not None:
            low = 0  # each document has its own sinks, wherever it starts
        elif visible.sinks and low:
            yield from _parts(0, min(visible.sinks, low), key_block)
    yield from _parts(low, high, key_block)


def _parts(low: int, high: int, most: int) -> Iterator[slice]:
    n_parts = -(-(high - low) // most)
    for part in range(n_parts):
        yield slice(low + (high - low) * part // n_parts, low + (high - low) * (part + 1) // n_parts)


def _cut(visible: Visibility, queries: slice, keys: slice) -> bool:
    """Whether order or window hides some of these keys from some of these queries."""
    if keys.stop - 1 > visible.past + queries.start:
        return True
    if not visible.cuts or visible.window is None:
        return False
    if visible.documents is None and keys.stop <= visible.sinks:
        return False
    return keys.start <= visible.past + queries.stop - 1 - visible.window


class _Documents:
    """Smallest and largest document in a stretch of tokens, per row of the batch; padding apart."""

    def __init__(self, visible: Visibility) -> None:
        assert visible.documents is not None
        self.visible = visible
        self.documents = visible.documents.cpu()  # (B, S)
        self.sink = None
        if visible.cuts and visible.sinks:
            assert visible.places is not None
            self.sink = visible.places.cpu() < visible.sinks

    def _range(self, tokens: slice) -> tuple[Tensor, Tensor]:
        part = self.documents[:, tokens]
        return part.masked_fill(part < 0, torch.iinfo(part.dtype).max).amin(1), part.amax(1)

    def _own(self, queries: slice) -> slice:
        return slice(self.visible.past + queries.start, self.visible.past + queries.stop)

    def meet(self, queries: slice, keys: slice) -> bool:
        """Whether a document may stand in both; ranges that overlap count, so some tiles are computed for nothing."""
        low, high = self._range(self._own(queries))
        first, last = self._range(keys)
        together = (first <= high) & (last >= low) & (last >= 0) & (high >= 0)
        if self.sink is not None and self.visible.window is not None:
            near = keys.stop > self.visible.past + queries.start - self.visible.window + 1
            if not near:
                together = together & self.sink[:, keys].any(1)
        return bool(together.any())

    def same(self, queries: slice, keys: slice) -> bool:
        """Whether both are one and the same document in every row, without padding."""
        both = torch.cat((self.documents[:, self._own(queries)], self.documents[:, keys]), dim=1)
        return bool((both == both[:, :1]).all() and (both >= 0).all())
