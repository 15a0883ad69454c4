"""What each parameter is, and the value it starts with."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from softattn_lm.attention.projections import FusedLinear

InitKind = Literal["gpt2", "fan_in"]
Role = Literal["embedding", "head", "hidden", "vector"]


@dataclass(frozen=True)
class ParameterRole:
    """What an optimizer needs to know of a parameter. `rows`: heights of the parts of a fused matrix, which are
    matrices of their own; (shape[0],) for an ordinary one. A tied head appears once, as the embedding."""

    name: str
    parameter: nn.Parameter
    role: Role
    rows: tuple[int, ...]


def parameter_roles(model: nn.Module, head: Tensor, tables: Sequence[Tensor]) -> list[ParameterRole]:
    """Every parameter exactly once, in the order of `named_parameters`. tables: those indexed by position."""
    fused = {id(m.weight): tuple(m.parts.values()) for m in model.modules() if isinstance(m, FusedLinear)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {
        id(table) for table in tables
    }
    roles = []
    for name, parameter in model.named_parameters():
        role: Role = "vector"
        if id(parameter) in embeddings:
            role = "embedding"
        elif parameter is head:
            role = "head"
        elif parameter.ndim == 2:
            role = "hidden"
        roles.append(ParameterRole(name, parameter, role, fused.get(id(parameter), (parameter.shape[0],))))
    return roles


def stream(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Independent N(0, 1) numbers, float32, as a pure function of (seed, name, row, column).

    A 1-D shape is one row. Row r of every tensor of this name starts with the same numbers, so that a larger tensor
    contains the smaller one as its leading block. That is what makes two arms of an ablation start from the same place.
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype=np.uint64)
    rows = 1 if len(shape) == 1 else shape[0]
    values = np.empty((rows, math.prod(shape) // max(rows, 1)), dtype=np.float32)
    for row in range(rows):
        # The row stands in the highest counter word: streams of different rows cannot meet.
        bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, row], dtype=np.uint64))
        values[row] = np.random.Generator(bits).standard_normal(values.shape[1])
    return torch.from_numpy(values.reshape(shape))


@dataclass(frozen=True)
class Initialiser:
    """`gpt2` draws matrices from N(0, 0.02²); `fan_in` from N(0, 1/columns) and tables from N(0, 1), which keeps
    activations at unit variance. init_q and init_k choose for W_q and W_k apart.

    The matrices that write to the residual stream are smaller by √(2·n_layer). zero_out: they, and an untied head, are
    0. Biases start at 0; gains, the look-back and what a kernel has of its own keep what their constructors gave them.
    """

    seed: int
    n_layer: int
    init: InitKind
    init_q: InitKind
    init_k: InitKind
    zero_out: bool

    @torch.no_grad()
    def fill(self, model: nn.Module, roles: list[ParameterRole], tied: bool) -> None:
        fused = {f"{name}.weight": m.parts for name, m in model.named_modules() if isinstance(m, FusedLinear)}
        for name, module in model.named_modules():
            # torch draws them from its own generator, whatever the seed. A kernel's start where the kernel put them.
            if isinstance(module, nn.Linear) and module.bias is not None and ".kernel." not in name:
                module.bias.zero_()
        for named in roles:
            if named.role == "vector" or named.parameter.is_meta:
                continue
            writes = named.name.endswith(("attention.out.weight", "mlp.down.weight"))
            if self.zero_out and (writes or named.role == "head"):
                named.parameter.zero_()
                continue
            first = 0
            for part, rows in fused.get(named.name, {"": named.parameter.shape[0]}).items():
                values = named.parameter[first : first + rows]
                std = self._std(named, part, values.shape[1], tied)
                own = f"{named.name.removesuffix('weight')}{part}" if part else named.name
                values.copy_(
                    std
                    * (1 / math.sqrt(2 * self.n_layer) if writes else 1)
                    * stream(self.seed, own, tuple(values.shape))
                )
                first += rows

    def _std(self, named: ParameterRole, part: str, columns: int, tied: bool) -> float:
        if {"q": self.init_q, "k": self.init_k}.get(part, self.init) == "gpt2":
            return 0.02
        # A tied table is read as a matrix too, and its logits should not start at √C.
        wide = named.role == "embedding" and not (tied and named.name == "embed.weight")
        return 1.0 if wide else columns**-0.5
