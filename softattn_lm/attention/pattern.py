"""Different layers, different policies: one mechanism for attention, mask and position."""

from collections.abc import Sequence
from typing import Any

from softattn_lm.errors import UserError


class Pattern:
    """Layer i uses policy i mod n. `pattern` names them, `layers` are the built policies, in the same order.

    Raises UserError for an empty pattern.
    """

    def __init__(self, pattern: list[str], layers: Sequence[Any]) -> None:
        if not pattern or len(pattern) != len(layers):
            raise UserError("a pattern names at least one policy, for example attention.pattern=[uniform,uniform,sdpa]")
        self.pattern, self.layers = list(pattern), list(layers)


def of_layer(policy: Any, layer: int) -> Any:
    """The policy that a layer uses."""
    return policy.layers[layer % len(policy.layers)] if isinstance(policy, Pattern) else policy
