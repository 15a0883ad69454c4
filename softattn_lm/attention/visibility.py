"""Which keys may each query read: one type and one meaning (True = may read), for every kernel and the cache."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softattn_lm.errors import UserError


@dataclass(frozen=True)
class Visibility:
    """`new` queries behind `past` cached keys: query i stands at key past + i and reads `window` keys, itself included.

    new=3, past=1, window=2:   1 1 . .
                               . 1 1 .
                               . . 1 1

    Built once per forward pass and shared by the layers, so the dense mask is made at most once.
    """

    new: int
    past: int = 0
    window: int | None = None
    device: torch.device | str = "cpu"

    @property
    def total(self) -> int:
        """S: cached keys and new ones."""
        return self.past + self.new

    @property
    def is_plain_causal(self) -> bool:
        """A kernel may use its own lower triangle: no cached keys, and no window that cuts."""
        return self.past == 0 and (self.window is None or self.new <= self.window)

    @property
    def reads_all(self) -> bool:
        """A single query that reads every key there is, so that no mask is needed."""
        return self.new == 1 and (self.window is None or self.total <= self.window)

    @cached_property
    def _dense(self) -> Tensor:
        query = torch.arange(self.past, self.total, device=self.device)[:, None]
        key = torch.arange(self.total, device=self.device)
        readable = key <= query
        if self.window is not None:
            readable &= key > query - self.window
        return readable

    def dense(self) -> Tensor:
        """(T, S) bool, True = may read; broadcasts over (B, H, T, S)."""
        return self._dense

    @cached_property
    def _count(self) -> Tensor:
        count = torch.arange(self.past + 1, self.total + 1, device=self.device)
        return count if self.window is None else count.clamp(max=self.window)

    def count(self) -> Tensor:
        """(T, 1) int64: how many keys each query reads, itself included; broadcasts over (B, H, T, 1)."""
        return self._count[:, None]


class Causal:
    """Query i reads keys j with i - window < j <= i: `window` keys, itself included. No window reads all of the past.

    T=4, window=2:   1 . . .
                     1 1 . .
                     . 1 1 .
                     . . 1 1

    Raises UserError if window < 1.
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise UserError(f"mask.window={window} reads no key; a query reads itself, so type mask.window=1 or more")
        self.window = window

    def span(self, context: int) -> int:
        """How many keys a query of a model with this context ever reads, itself included."""
        return context if self.window is None else min(self.window, context)
