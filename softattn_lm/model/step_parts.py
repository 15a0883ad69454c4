"""The parts of a decode step that cost time, in two ways: for kernels of a library, and for a compiler.

    product, heads   norm and a product with a matrix
    read             attention of one query of each head, softmax(scale · q kᵀ) v
    likeliest        argmax over the vocabulary

One token is rows times matrices, as fast as their numbers can be read; on a GPU what is lost is lost between kernels,
of which each waits for the one before. So the second way leaves few of them, six a layer: every output is one sum over
numbers that lie together, and makes the norm or the softmax before it anew, as that costs less than a kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits at most that are compared at once: torch.compile leaves an argmax to one of a GPU's many processors.
CHUNK = 256
Norm = Callable[[Tensor], Tensor]


class Way(ABC):
    """x: (B, 1, C). weight: (N, C). norm: of x, or None."""

    @abstractmethod
    def product(self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(B, 1, N)."""

    @abstractmethod
    def heads(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, counts: Sequence[int]
    ) -> Sequence[Tensor]:
        """N = sum of counts · D -> (B, count, 1, D) for each."""

    @abstractmethod
    def values(self, keys: Tensor) -> Tensor:
        """A buffer of zeros for as many values as `keys` (B, G, S, D), in an order of its own."""

    @abstractmethod
    def keep(self, values: Tensor, places: Tensor, v: Tensor) -> None:
        """v (B, G, T, D) goes to `places` (T,) of the buffer."""

    @abstractmethod
    def read(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
        """q (B, H, 1, D), keys (B, G, S, D), the buffer of values, seen (S,) -> y (B, H, 1, D)."""

    @abstractmethod
    def likeliest(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B, 1) int64; of equals the first."""


class Library(Way):
    """One call for each part."""

    def product(self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x if norm is None else norm(x), weight, bias)

    def heads(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, counts: Sequence[int]
    ) -> Sequence[Tensor]:
        made = self.product(x, norm, weight, bias).unflatten(-1, (sum(counts), -1)).transpose(1, 2)
        return made.split(list(counts), dim=1)

    def values(self, keys: Tensor) -> Tensor:
        return torch.zeros_like(keys)

    def keep(self, values: Tensor, places: Tensor, v: Tensor) -> None:
        values.index_copy_(2, places, v)

    def read(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
        grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None], scale=scale, enable_gqa=grouped)

    def likeliest(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1, keepdim=True)


class Reductions(Way):
    """For torch.compile, which writes none of the large tensors below down: uncompiled this is slow.

    Products of several samples are left to the library, which reads a matrix once for all of them; attention is not, as
    fused kernels give one query of a head to one processor.
    """

    def product(self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > 1:
            return Library().product(x, norm, weight, bias)
        return _sums(x, norm, weight, bias)[None, None]

    def heads(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, counts: Sequence[int]
    ) -> Sequence[Tensor]:
        if len(x) > 1:
            return Library().heads(x, norm, weight, bias, counts)
        # Each in its own shape: keys and values then go to their buffers from the kernel that makes them.
        rows = weight.unflatten(0, (sum(counts), -1)).split(list(counts))  # (count, D, C)
        biases = [None] * len(counts) if bias is None else bias.unflatten(0, (sum(counts), -1)).split(list(counts))
        return [_sums(x, norm, of, added)[None, :, None] for of, added in zip(rows, biases, strict=True)]

    def values(self, keys: Tensor) -> Tensor:
        # (B, G, D, S): a component of y is a sum over positions, which therefore lie together.
        return torch.zeros_like(keys.transpose(2, 3), memory_format=torch.contiguous_format)

    def keep(self, values: Tensor, places: Tensor, v: Tensor) -> None:
        values.index_copy_(3, places, v.transpose(2, 3))

    def read(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
        grouped = q.unflatten(1, (keys.shape[1], -1))  # (B, G, H/G, 1, D)
        scores = scale * (_wide(grouped) * _wide(keys[:, :, None])).sum(-1)  # (B, G, H/G, S)
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores[..., None, :].expand(*scores.shape[:-1], q.shape[-1], -1).softmax(-1)  # (B, G, H/G, D, S)
        y = (weights * _wide(values[:, :, None])).sum(-1)  # (B, G, H/G, D)
        return y.flatten(1, 2)[:, :, None].to(q.dtype)

    def likeliest(self, logits: Tensor) -> Tensor:
        # In chunks that leave no rest: filling one up would take a kernel.
        size = max(n for n in range(1, CHUNK + 1) if logits.shape[-1] % n == 0)
        best, place = logits.unflatten(-1, (-1, size)).max(-1)  # (B, V / size)
        chunk = best.argmax(-1, keepdim=True)
        return chunk * size + place.gather(-1, chunk)


def _sums(x: Tensor, norm: Norm | None, rows: Tensor, bias: Tensor | None) -> Tensor:
    """(1, 1, C) and rows (..., C) -> (...): the norm of x, made for every row, times the row."""
    wide = x.view(-1).expand(rows.shape)
    y = (_wide(rows) * _wide(wide if norm is None else norm(wide))).sum(-1)
    return (y if bias is None else y + bias).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least, in which sums are made."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
