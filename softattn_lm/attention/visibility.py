"""Which keys may each query read: one type and one meaning (True = may read), for every kernel and the cache."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from softattn_lm.attention.cache import KVCache
from softattn_lm.errors import UserError

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Visibility:
    """`new` queries behind `past` cached keys: query i stands at key past + i and reads `window` keys, itself included.

    new=3, past=1, window=2:   1 1 . .
                               . 1 1 .
                               . . 1 1

    sinks: the first tokens of the text, which every query reads besides its window (Xiao et al. 2023,
    arXiv:2309.17453). start: position of the first query in the text; more than `past` when the cache has dropped keys
    between the sinks and the window. documents (B, S): a query reads its own document only; a negative number is
    padding, which reads nothing and is read by nobody. places (B, S): position of each key in its document.

    Built once per forward pass and mask and shared by the layers, so the dense form is made at most once.
    """

    new: int
    past: int = 0
    window: int | None = None
    sinks: int = 0
    start: int | None = None
    documents: Tensor | None = None
    places: Tensor | None = None
    device: torch.device | str = "cpu"

    @property
    def total(self) -> int:
        """S: cached keys and new ones."""
        return self.past + self.new

    @property
    def cuts(self) -> bool:
        """Whether the window hides anything from anyone here."""
        return self.window is not None and self.total > self.window

    @property
    def is_plain_causal(self) -> bool:
        """A kernel may use its own lower triangle: no cached keys, no window that cuts, one document."""
        return self.past == 0 and not self.cuts and self.documents is None

    @property
    def reads_all(self) -> bool:
        """A single query that reads every key there is, so that no mask is needed."""
        return self.new == 1 and not self.cuts and self.documents is None

    @cached_property
    def key_positions(self) -> Tensor:
        """(S,) int64: where each key stands in the text."""
        index = torch.arange(self.total, device=self.device)
        dropped = 0 if self.start is None else self.start - self.past
        return (
            index + dropped if not (dropped and self.sinks) else torch.where(index < self.sinks, index, index + dropped)
        )

    def distance(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """(t, s) int64: how far back from each query each key stands; negative in the future."""
        position = self.key_positions
        return position[self.past :][queries, None] - position[keys]

    def tile(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """(t, s) bool, or (B, 1, t, s) with documents: that part of the dense mask, made without the rest."""
        distance = self.distance(queries, keys)
        readable = distance >= 0
        near = None if self.window is None else distance < self.window
        if self.documents is None:
            if near is None:
                return readable
            return readable & (near | (self.key_positions[keys] < self.sinks) if self.sinks else near)
        mine, theirs = self.documents[:, self.past :][:, queries], self.documents[:, keys]
        readable = readable & (mine[:, :, None] == theirs[:, None, :]) & (theirs >= 0)[:, None, :]  # (B, t, s)
        if near is not None:
            if self.sinks:
                assert self.places is not None
                near = near | (self.places[:, None, keys] < self.sinks)
            readable = readable & near
        return readable[:, None]

    def remember(self, documents: Tensor, places: Tensor, cache: KVCache | None, layer: int) -> "Visibility":
        """The same with documents and places (B, T) of the new tokens set behind those of the keys that the cache
        holds.
        """
        if cache is None:
            return replace(self, documents=documents, places=places)
        both = torch.stack((documents, places), dim=-1)[:, None]  # (B, 1, T, 2)
        kept = cache.extend(layer, "documents", both)[:, 0]  # (B, S, 2)
        return replace(self, documents=kept[..., 0], places=kept[..., 1])

    @cached_property
    def _dense(self) -> Tensor:
        return self.tile()

    def dense(self) -> Tensor:
        """(T, S) bool, or (B, 1, T, S) with documents; True = may read. Broadcasts over (B, H, T, S)."""
        return self._dense

    @cached_property
    def _count(self) -> Tensor:
        if self.documents is not None or (self.sinks and self.cuts):
            return self.dense().sum(-1)
        count = torch.arange(self.past + 1, self.total + 1, device=self.device)
        return count if self.window is None else count.clamp(max=self.window)

    def count(self) -> Tensor:
        """(T, 1) or (B, 1, T, 1) int64: how many keys each query reads, itself included."""
        return self._count[..., None]

    @property
    def has_empty_rows(self) -> bool:
        """Whether a query may have nothing to read, which is 0 by contract: padding only."""
        return self.documents is not None


class Causal:
    """Query i reads keys j with i - window < j <= i: `window` keys, itself included. No window reads all of the past.

    T=4, window=2:   1 . . .      and with sinks=1:   1 . . .
                     1 1 . .                          1 1 . .
                     . 1 1 .                          1 1 1 .
                     . . 1 1                          1 . 1 1

    documents: texts packed into one row do not see each other, and their positions start again at 0.

    Raises UserError if window < 1 or sinks < 0.
    """

    def __init__(self, window: int | None = None, sinks: int = 0, documents: bool = False) -> None:
        if window is not None and window < 1:
            raise UserError(f"mask.window={window} reads no key; a query reads itself, so type mask.window=1 or more")
        if sinks < 0:
            raise UserError(f"mask.sinks={sinks} counts tokens at the start of the text; type mask.sinks=0 or more")
        if sinks and window is None:
            raise UserError(
                f"mask.sinks={sinks} needs a window to stand outside of; type mask.window=64, or mask.sinks=0"
            )
        self.window, self.sinks, self.documents = window, sinks, documents

    def span(self, context: int) -> int:
        """How many last keys a query of a model with this context reads at most, itself included and sinks apart."""
        return context if self.window is None else min(self.window, context)

    def visibility(self, shared: Visibility, context: int) -> Visibility:
        """This mask over the tokens that `shared` describes."""
        seen = shared.documents if self.documents else None
        return replace(shared, window=self.span(context), sinks=self.sinks, documents=seen)
