"""A sequence in chunks of equal length: inside a chunk every pair of tokens is looked at, and all that was before it is
one state. The cost is that of a recurrence, the arithmetic that of matrix products.

Yang et al. 2023 (GLA), arXiv:2312.06635. Chunks start at the first token, so a later one cannot move their borders.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from softattn_lm.errors import UserError


def checked(chunk: int) -> int:
    """Raises UserError for a chunk of no tokens."""
    if chunk < 1:
        raise UserError(f"attention.chunk={chunk} counts tokens; type attention.chunk=32 or another number above 0")
    return chunk


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, H, T, E) -> (B, H, N, c, E) with c = min(chunk, T); zeros fill the last one."""
    length = x.shape[-2]
    c = min(chunk, length)
    filled = F.pad(x, (0, 0, 0, -length % c)) if length % c else x
    return filled.unflatten(-2, (-1, c))


def joined(y: Tensor, length: int) -> Tensor:
    """(B, H, N, c, E) -> (B, H, length, E)."""
    return y.flatten(2, 3)[:, :, :length]


def at_the_end(q: Tensor, total: int) -> Tensor:
    """(B, H, T, E) -> (B, H, total, E): the queries of the last T of `total` tokens, zeros before them."""
    return F.pad(q, (0, 0, total - q.shape[-2], 0)) if q.shape[-2] < total else q


def precise(x: Tensor) -> Tensor:
    """At least float32: a state is a sum over all tokens, and in bfloat16 it would stand still after a few hundred."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_given(x: Tensor) -> torch.autocast:
    """Autocast would round the products of a state again."""
    return torch.autocast(x.device.type, enabled=False)
