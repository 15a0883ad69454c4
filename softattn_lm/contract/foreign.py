"""Callables of another stack as kernels, by their signature, so that the same contract is run on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.subject import Subject
from softattn_lm.errors import UserError

# Beside query, key and value, of torch's scaled_dot_product_attention: what a caller may hand over.
TORCH_TAKES = frozenset(("attn_mask", "dropout_p", "is_causal", "scale"))
NO_MASK = "it takes no attn_mask"
OWN_MASK = "its mask_mod is its mask"


def like_sdpa(name: str, function: Callable[..., Any]) -> Subject:
    """A callable with the arguments of torch's scaled_dot_product_attention, or some of them."""
    takes = arguments_of(function)
    refusals = {} if "attn_mask" in takes else dict.fromkeys(("window", "sinks", "documents", "bias"), NO_MASK)
    if "dropout_p" not in takes:
        refusals["dropout"] = "it takes no dropout_p"

    class Foreign(LikeSDPA):
        refuses = refusals

    untried = {"future_nan_keys_are_not_read": "torch itself adds a mask to scores, and a sum with NaN is NaN"}
    return Subject(name, partial(Foreign, function), untried=untried)


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names that it takes: all of torch's with **kwargs, and where Python knows none, as of a builtin."""
    parameters = parameters_of(function)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return TORCH_TAKES
    return frozenset(parameter.name for parameter in parameters)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None for a callable without a signature, such as torch's own functions."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


class LikeSDPA(AttentionKernel):
    """Calls as a decoding caller would: is_causal=True also behind cached keys, where the last query reads all of them.

    attn_mask says what a triangle cannot: True = may read; with a bias, numbers to add. `weights` is what it does to
    the unit vectors, so nothing is assumed about its formula.
    """

    rows_sum_to = "anything"

    def __init__(self, function: Callable[..., Any], dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.function = function
        self.takes = arguments_of(function)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        b, h, s, width = k.shape
        n = -(-s // width)  # values have `width` components, so the S unit vectors are handed over in n parts
        units = torch.eye(s, n * width, dtype=q.dtype).unflatten(1, (n, width)).transpose(0, 1)  # (n, S, width)
        v = units[:, None, None].expand(n, b, h, s, width).flatten(0, 1)
        if visible.documents is not None:
            visible = replace(visible, documents=visible.documents.repeat(n, 1))
        y = self._call(q.repeat(n, 1, 1, 1), k.repeat(n, 1, 1, 1), v, scale, visible, bias, 0.0)
        return y.unflatten(0, (n, b)).permute(1, 2, 3, 0, 4).flatten(3)[..., :s]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        return self._call(q, k, v, scale, visible, bias, self.dropout if self.training else 0.0)

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None,
        dropout: float,
    ) -> Tensor:
        given: dict[str, Any] = {}
        if isinstance(scale, Tensor):
            q, scale = (q * scale).to(q.dtype), 1.0
        if "scale" in self.takes:
            given["scale"] = scale
        else:
            q = q * (scale * q.shape[-1] ** 0.5)  # it divides by the square root of the width itself
        if "dropout_p" in self.takes:
            given["dropout_p"] = dropout
        triangle = not visible.cuts and visible.documents is None and bias is None
        if triangle and "is_causal" in self.takes:
            given["is_causal"] = True
        elif "attn_mask" in self.takes:
            given["attn_mask"] = visible.dense()
            if bias is not None:
                given["attn_mask"] = bias.tile().to(q.dtype).masked_fill(~visible.dense(), -torch.inf)
        y = self.function(q, k, v, **given)
        return y[0] if isinstance(y, tuple) else y


def like_flex(name: str, *mods: Callable[..., Any]) -> Subject:
    """A score_mod, a mask_mod or both, with FlexAttention's signatures; told apart by their number of arguments.

    What is given is what is run: a score_mod alone has to hide the future itself. Raises UserError for anything else.
    """
    by_arity = {len(parameters_of(mod) or ()): mod for mod in mods}
    if len(by_arity) != len(mods) or not set(by_arity) <= {4, 5}:
        raise UserError(
            f"--like flex {name}: a mask_mod has 4 arguments (b, h, q_idx, kv_idx), a score_mod 5 (score, b, h, q_idx, "
            "kv_idx); give one of each at most, such as my_file.py:score_mod,mask_mod"
        )
    return Subject(name, partial(LikeFlex, score_mod=by_arity.get(5), mask_mod=by_arity.get(4)))


class LikeFlex(AttentionKernel):
    """softmax over score_mod(scores) where mask_mod allows, evaluated for all indices at once. Indices count from the
    start of the text, also behind a cache.
    """

    refuses: ClassVar[dict[str, str]] = {
        "window": OWN_MASK,
        "sinks": OWN_MASK,
        "documents": OWN_MASK,
        "bias": "its score_mod is its bias",
        "dropout": "FlexAttention drops no weights",
    }
    reads_every_key = False

    def __init__(self, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.score_mod, self.mask_mod = score_mod, mask_mod

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        scores = scale * (q @ k.transpose(-2, -1))  # (B, H, T, S)
        b, h = torch.arange(q.shape[0])[:, None, None, None], torch.arange(q.shape[1])[:, None, None]
        j = visible.key_positions
        i = j[visible.past :, None]
        if self.score_mod is not None:
            scores = self.score_mod(scores, b, h, i, j).expand_as(scores)
        if self.mask_mod is not None:
            scores = scores.masked_fill(~self.mask_mod(b, h, i, j), -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        precise = torch.promote_types(scores.dtype, torch.float32)
        a = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1, dtype=precise)
        return a.masked_fill(empty, 0.0).to(q.dtype)
