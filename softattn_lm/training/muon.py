"""Muon: momentum made orthogonal, M -> U Vᵀ, for the matrices inside the blocks.

    B <- B + (1 - μ) (G - B)          momentum
    M  = G + μ (B - G)                Nesterov's look ahead
    W <- W (1 - lr · decay) - lr · sqrt(max(1, rows / columns)) · orthogonal(M)

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; coefficients, order of operations and the factor are
those of `torch.optim.Muon(adjust_lr_fn="original")`, which takes one matrix at a time. Here all parts of equal shape go
through one batched iteration, and the parts of a fused matrix (Q, K, V stacked in rows) are made orthogonal each by
itself: an orthogonal stack would let a large Q shrink K and V.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly U Vᵀ of each matrix, by five quintic Newton-Schulz steps; singular values end within about 0.7 to 1.2.

    `matrices` (N, rows, columns) with rows <= columns, so that the Gram matrix is the small one -> the same shape in
    `dtype`.
    """
    assert matrices.ndim == 3 and matrices.shape[1] <= matrices.shape[2], matrices.shape
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    # The Frobenius norm bounds the spectral norm: the iteration starts inside its region of convergence.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·G + c·G²
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a·X + (b·G + c·G²) X
    return x


def orthogonal_updates(momenta: Sequence[Tensor], rows: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """The direction each matrix moves in, scaled by sqrt(max(1, rows / columns)) of the part it belongs to.

    `momenta`: matrices of any shapes; `rows[i]`: row counts of the parts of matrix i, adding up to its rows.
    Returns tensors shaped and typed like `momenta`.
    """
    waiting: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    targets: dict[tuple[int, int], list[Tensor]] = defaultdict(list)  # views into `updates`, transposed where tall
    updates = [torch.empty_like(momentum) for momentum in momenta]
    for momentum, update, parts in zip(momenta, updates, rows, strict=True):
        assert sum(parts) == momentum.shape[0], (parts, momentum.shape)
        for part, target in zip(momentum.split(list(parts)), update.split(list(parts)), strict=True):
            if part.shape[0] > part.shape[1]:
                part, target = part.mT, target.mT
            waiting[part.shape[0], part.shape[1]].append(part)
            targets[part.shape[0], part.shape[1]].append(target)
    for shape, parts_of_a_shape in waiting.items():
        stacked = parts_of_a_shape[0].new_empty((len(parts_of_a_shape), *shape), dtype=dtype)
        torch._foreach_copy_(list(stacked.unbind()), parts_of_a_shape)
        torch._foreach_copy_(targets[shape], list(orthogonal(stacked, dtype).unbind()))
    for update, parts in zip(updates, rows, strict=True):
        for part in update.split(list(parts)):
            if part.shape[0] > part.shape[1]:
                part.mul_(math.sqrt(part.shape[0] / part.shape[1]))
    return updates


def muon_dtype(compute: str, device: torch.device) -> torch.dtype:
    """The type the iteration runs in. "auto" is bfloat16 where matrix products in it are fast, float32 elsewhere.

    bfloat16 is fast on CUDA from compute capability 8.0 and on processors with AMX or AVX-512 BF16 instructions;
    elsewhere it is emulated and slower than float32. The update is rounded to about three digits, which Muon does not
    notice.
    """
    if compute == "bfloat16":
        return torch.bfloat16
    if compute == "float32":
        return torch.float32
    return torch.bfloat16 if fast_bfloat16(device) else torch.float32


def fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are faster than in float32 there."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return device.type == "cpu" and bool(_cpu_flags() & {"avx512_bf16", "amx_bf16"})


@cache
def _cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor as Linux names them; empty where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()
