"""An option that a part of a model would ignore is refused, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softattn_lm.attention.block import CausalSelfAttention
from softattn_lm.attention.projections import Projections
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.position.base import Position
from softattn_lm.position.rotary import Rotary


def check_kernels(
    attentions: Sequence[CausalSelfAttention], masks: Sequence[Causal], positions: Sequence[Position]
) -> None:
    """Raises UserError for what the kernel of a layer refuses of its mask, its position and its dropout."""
    for layer, (attention, mask, position) in enumerate(zip(attentions, masks, positions, strict=True)):
        kernel = attention.kernel
        asked = {
            "window": mask.window is not None,
            "sinks": mask.sinks > 0,
            "documents": mask.documents,
            "bias": position.bias(Visibility(1)) is not None,
            "dropout": kernel.dropout > 0,
        }
        for name, reason in kernel.refuses.items():
            if asked.get(name):
                others = {"bias": f"position={type(position).__name__.lower()}", "dropout": "model.dropout"}
                setting = others.get(name, f"mask.{name}")
                raise UserError(f"attention {type(kernel).__name__} of layer {layer} cannot honour {setting}: {reason}")
        if isinstance(position, Rotary) and position.rotated % kernel.turned_by:
            raise UserError(
                f"attention {type(kernel).__name__} of layer {layer} needs pairs that stay together: position=rotary "
                f"must turn a multiple of {kernel.turned_by} components of a head, not {position.rotated}; "
                f"type {_turning_a_multiple(attention, position.rotated)}"
            )


def _turning_a_multiple(attention: CausalSelfAttention, rotated: int) -> str:
    """The setting with which position=rotary turns a multiple of what the kernel asks for, as near to `rotated` as may
    be."""
    step, part = attention.kernel.turned_by, attention.projections.turned
    head_dim = attention.out.in_features // attention.n_head
    width = head_dim if part is None else part
    multiples = range(step, width + 1, step)
    if rotated < width and multiples:
        nearest = min(multiples, key=lambda n: abs(n - rotated))
        return f"position.fraction={nearest / width:.4g}"
    if part is not None and head_dim > step:
        return f"projections.rope_dim={min(range(step, head_dim, step), key=lambda n: abs(n - part))}"
    return f"model.head_dim={head_dim + -head_dim % step if head_dim % step else 2 * step}"


def check_projections(projections: Projections, settings: Mapping[str, Any]) -> None:
    """Raises UserError for a setting of the model, of those given, that is on and that these projections refuse."""
    for name, reason in projections.refuses.items():
        if settings.get(name):
            said = str(settings[name]).lower()
            raise UserError(
                f"projections {type(projections).__name__} cannot honour model.{name}={said}: {reason}; type "
                f"model.{name}={'false' if settings[name] is True else 0}, or other projections"
            )
