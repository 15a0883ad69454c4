"""Honoured or refused: for every option, a kernel either acts on it as its `weights` say or states why it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.bias import TensorBias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.property import difference
from softattn_lm.contract.subject import H, Subject, features, inputs, packed

# Option as people say it -> its name in `AttentionKernel.refuses`, or of a constructor's argument.
REFUSED_AS = {
    "window": "window",
    "sink + window": "sinks",
    "documents": "documents",
    "bias": "bias",
    "dropout": "dropout",
    "grouped heads": "grouped",
    "cache": "cache",
    "T ≠ S": "cache",
}
ARGUMENTS = {"soft cap": ("soft_cap", 0.5), "sink": ("sink", "one")}
OPTIONS = (
    "window",
    "sink + window",
    "documents",
    "bias",
    "soft cap",
    "sink",
    "dropout",
    "grouped heads",
    "cache",
    "T ≠ S",
)


def refusals(subject: Subject) -> dict[str, str]:
    """Option -> why this kernel does not honour it, for those that it refuses."""
    found = {}
    for option in OPTIONS:
        if option in ARGUMENTS:
            assert not isinstance(subject.policy, Pattern)
            name = ARGUMENTS[option][0]
            taken = name in inspect.signature(subject.policy).parameters
            reason = None if taken else f"its constructor takes no {name}"
        else:
            reason = subject.refusal(REFUSED_AS[option])
        if reason is not None:
            found[option] = reason
    return found


def ignored(subject: Subject) -> list[str]:
    """The options that are neither refused nor acted on: taken and dropped, or other than `weights` says."""
    refused = refusals(subject)
    return [option for option in OPTIONS if option not in refused and not _acts(subject, option)]


def _acts(subject: Subject, option: str) -> bool:
    new = 12
    qkv = inputs(new)
    with torch.no_grad():
        if option in ("grouped heads", "cache", "T ≠ S"):
            return _SAME[option](subject)
        if option == "dropout":
            kernel = subject.kernel(dropout=0.5)
            given = _given(kernel, new)
            return not torch.equal(kernel.train()(*qkv, **given), kernel.eval()(*qkv, **given))
        name, value = ARGUMENTS.get(option, ("", None))
        options: dict[str, Any] = {name: value} if name else {}
        kernel = subject.kernel(**options)
        changes: dict[str, dict[str, Any]] = {
            "window": {"visible": Visibility(new, window=3)},
            "sink + window": {"visible": Visibility(new, window=3, sinks=2)},
            "documents": {"visible": Visibility(new, documents=packed(new))},
            "bias": {"bias": TensorBias(torch.randn(H, new, new, generator=torch.Generator().manual_seed(0)))},
        }
        given = _given(kernel, new) | changes.get(option, {})
        y = kernel(*qkv, **given)
        plain = subject.kernel()
        changed = not torch.equal(y, plain(*qkv, **_given(plain, new)))
        return changed and difference(y, kernel.weights(*qkv[:2], **given) @ qkv[2]) < 2e-5


def _given(kernel: AttentionKernel, new: int, past: int = 0) -> dict[str, Any]:
    return {"scale": 0.5, "visible": Visibility(new, past), "features": features(kernel, new, past)}


def _grouped(subject: Subject) -> bool:
    kernel, (q, k, v) = subject.kernel(), inputs(6, keys=2)
    wide, given = (expand_groups(k, H), expand_groups(v, H)), _given(kernel, 6)
    y: Tensor = kernel(q, k, v, **given) if kernel.grouped else kernel(q, *wide, **given)
    return difference(y, kernel.weights(q, wide[0], **given) @ wide[1]) < 2e-5


def _behind_a_cache(subject: Subject) -> bool:
    model, idx = subject.model(), torch.arange(10)[None]
    cache = model.new_cache()
    return difference(torch.cat([model(part, cache) for part in idx.split([6, 1, 3], dim=1)], dim=1), model(idx)) < 5e-5


def _fewer_queries(subject: Subject) -> bool:
    kernel, (q, k, v) = subject.kernel(), inputs(9)
    few = kernel(q[:, :, 5:], k, v, **_given(kernel, 4, 5))
    return difference(few, kernel(q, k, v, **_given(kernel, 9))[:, :, 5:]) < 2e-5


_SAME: dict[str, Callable[[Subject], bool]] = {
    "grouped heads": _grouped,
    "cache": _behind_a_cache,
    "T ≠ S": _fewer_queries,
}
