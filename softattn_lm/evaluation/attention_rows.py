"""What one row of attention weights is like: how spread out it is, and how much gradient it lets through.

    entropy           H = −Σ p ln p                              nats; ln n for n equal weights, 0 for one key
    support           e^H                                        how many keys are read in effect
    Jacobian norm     ‖∂p/∂s‖ = ‖diag(p) − p pᵀ‖ (Frobenius)     for p = softmax(s): what the scores can still learn
    dead              Jacobian norm below 1e-3

‖diag(p) − p pᵀ‖² = Σp² − 2Σp³ + (Σp²)², a difference of numbers near 1 when p is nearly one-hot: float64 only.
A softmax of two keys at 1 − ε and ε has norm 2ε: a row is dead when all but 5e-4 of it lies on one key.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEAD = 1e-3


def entropy(p: Tensor) -> Tensor:
    """(..., S) -> (...) nats; a weight of 0 adds nothing."""
    return -torch.xlogy(p, p).sum(-1)


def jacobian_norm(p: Tensor) -> Tensor:
    """(..., S) float64 -> (...). Rows may sum to less than 1: then it is that of a softmax with a sink."""
    assert p.dtype == torch.float64, p.dtype
    squares = p.square()
    second, third = squares.sum(-1), (squares * p).sum(-1)
    return (second - 2 * third + second.square()).clamp_min(0).sqrt()


def shares(a: Tensor) -> Tensor:
    """(..., S) weights of any sign and sum -> |A| divided by its sum over the row; a row of zeros stays one."""
    size = a.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
