"""An option that a part of a model would ignore is refused, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softattn_lm.attention.block import CausalSelfAttention
from softattn_lm.attention.projections import Projections
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.position.base import Position


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


def check_projections(projections: Projections, settings: Mapping[str, Any]) -> None:
    """Raises UserError for a setting of the model, of those given, that is on and that these projections refuse."""
    for name, reason in projections.refuses.items():
        if settings.get(name):
            said = str(settings[name]).lower()
            raise UserError(
                f"projections {type(projections).__name__} cannot honour model.{name}={said}: {reason}; type "
                f"model.{name}={'false' if settings[name] is True else 0}, or other projections"
            )
