"""Initial values: every parameter draws from a stream of its own, keyed by (seed, name), row by row.

Two models that share a parameter's name share its first rows and columns, whatever else they contain and however much
larger one of them is. That is what makes two arms of an ablation start from the same place.
"""

import hashlib
from typing import Literal

import numpy as np
import torch
from torch import Tensor

InitKind = Literal["gpt2", "fan_in"]


def stream(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Independent N(0, 1) numbers, float32, as a pure function of (seed, name, row, column).

    A 1-D shape is one row. Row r of every tensor of this name starts with the same numbers, so that a larger tensor
    contains the smaller one as its leading block.
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype=np.uint64)
    rows = 1 if len(shape) == 1 else shape[0]
    values = np.empty((rows, int(np.prod(shape)) // max(rows, 1)), dtype=np.float32)
    for row in range(rows):
        # The row stands in the highest counter word: streams of different rows cannot meet.
        bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, row], dtype=np.uint64))
        values[row] = np.random.Generator(bits).standard_normal(values.shape[1])
    return torch.from_numpy(values.reshape(shape))
