"""One optimizer per run, whose groups know what each parameter is for.

    AdamW       two groups: matrices (embeddings and head included) decay, gains, biases and scalars do not
    MuonAdamW   hidden matrices by Muon, everything else by AdamW, each role at its own multiple of one learning rate

Both are ordinary `torch.optim.Optimizer`s: accumulation, clipping and checkpoints need no special case, and the
schedule multiplies all groups alike. AdamW is Loshchilov & Hutter 2019, arXiv:1711.05101; for Muon see `muon.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from softattn_lm.errors import UserError
from softattn_lm.training.muon import muon_dtype, orthogonal_updates

if TYPE_CHECKING:
    from softattn_lm.model.decoder import ParameterRole


def _checked(roles: Sequence[ParameterRole], numbers: dict[str, float]) -> None:
    """Numbers are a person's, the list of parameters is ours."""
    if not 0.0 < numbers["lr"] < math.inf:
        raise UserError(f"lr={numbers['lr']} must be a finite number above 0, such as lr=1e-3")
    for name, value in numbers.items():
        if not 0.0 <= value < math.inf:
            raise UserError(f"optimizer.{name}={value} must be a finite number, 0 or more")
        if value >= 1.0 and name in ("beta1", "beta2", "momentum"):
            raise UserError(f"optimizer.{name}={value} must be below 1; 0.9 is usual")
    seen = {id(role.parameter) for role in roles}
    assert len(seen) == len(roles), "a parameter is listed twice"
    unknown = {role.role for role in roles} - {"hidden", "embedding", "head", "vector"}
    assert not unknown, f"unknown roles {sorted(unknown)}"


class AdamW(torch.optim.AdamW):
    """AdamW in which only matrices decay. `lr` in steps of the parameter's own unit; `weight_decay` per step, times
    lr.
    """

    def __init__(
        self,
        roles: Sequence[ParameterRole],
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        _checked(roles, {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay})
        groups = [
            {"params": [r.parameter for r in roles if r.role != "vector"], "weight_decay": weight_decay},
            {"params": [r.parameter for r in roles if r.role == "vector"], "weight_decay": 0.0},
        ]
        # Fused takes a fifth of the time of the loop over tensors (4 layers of width 128: 0.4 against 2 ms on two
        # cores).
        super().__init__(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            fused=_can_fuse([r.parameter for r in roles]),
        )


class MuonAdamW(torch.optim.Optimizer):
    """Muon for role "hidden", AdamW for the rest: two kinds of group in one optimizer.

    Every group's learning rate is a multiple of `lr`: 1 for hidden matrices, `embedding`, `head` and `vector` for the
    others. `weight_decay` is decoupled and multiplies lr; it reaches matrices only: hidden ones at `weight_decay`,
    embedding and head at `adam_weight_decay`. `compute` is the type of Muon's iteration, see `muon_dtype`.

    State: hidden: momentum (like the parameter). Others: step (scalar), exp_avg, exp_avg_sq. Plain tensors and numbers
    only, so that a checkpoint loads with `weights_only=True`.
    """

    def __init__(
        self,
        roles: Sequence[ParameterRole],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        embedding: float = 5.0,
        head: float = 0.25,
        vector: float = 0.5,
        beta1: float = 0.8,
        beta2: float = 0.95,
        eps: float = 1e-10,
        adam_weight_decay: float = 0.0,
        compute: Literal["auto", "bfloat16", "float32"] = "auto",
    ) -> None:
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "embedding": embedding,
            "head": head,
            "vector": vector,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "adam_weight_decay": adam_weight_decay,
        }
        _checked(roles, numbers)
        hidden = [role for role in roles if role.role == "hidden"]
        groups: list[dict[str, Any]] = [
            {
                "kind": "muon",
                "role": "hidden",
                "params": [role.parameter for role in hidden],
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "rows": [list(role.rows) for role in hidden],
                "compute": compute,
            }
        ]
        for name, multiple in (("embedding", embedding), ("head", head), ("vector", vector)):
            groups.append(
                {
                    "kind": "adamw",
                    "role": name,
                    "params": [role.parameter for role in roles if role.role == name],
                    "lr": lr * multiple,
                    "weight_decay": 0.0 if name == "vector" else adam_weight_decay,
                    "betas": [beta1, beta2],
                    "eps": eps,
                }
            )
        super().__init__([group for group in groups if group["params"]], {"lr": lr})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. Returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._muon(group)
            else:
                self._adamw(group)
        return loss

    def _muon(self, group: dict[str, Any]) -> None:
        chosen = [(p, rows) for p, rows in zip(group["params"], group["rows"], strict=True) if p.grad is not None]
        if not chosen:
            return
        parameters = [p for p, _ in chosen]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in parameters]
        buffers = [self.state[p]["momentum"] for p in parameters]
        mu = group["momentum"]
        torch._foreach_lerp_(buffers, gradients, 1.0 - mu)
        ahead = [_whole(m) for m in torch._foreach_lerp(gradients, buffers, mu)]
        dtype = muon_dtype(group["compute"], ahead[0].device)
        updates = orthogonal_updates(ahead, [rows for _, rows in chosen], dtype)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        shards = [_like(update, p) for update, p in zip(updates, parameters, strict=True)]
        torch._foreach_add_(parameters, shards, alpha=-group["lr"])

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        fused = _can_fuse(parameters)
        for p in parameters:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether torch's fused AdamW takes these: whole floating tensors on one of the devices that have the kernel."""
    return all(
        type(p) in (nn.Parameter, Tensor) and p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps")
        for p in parameters
    )


def _whole(tensor: Tensor) -> Tensor:
    """A sharded tensor (FSDP) gathered on every rank, as making a matrix orthogonal needs all of it; others as they
    are.
    """
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _like(update: Tensor, parameter: Tensor) -> Tensor:
    """This rank's share of a whole update, placed as its parameter is."""
    if not _is_sharded(parameter):
        return update
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(update, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


def _is_sharded(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" or type(getattr(tensor, "data", tensor)).__name__ == "DTensor"
