"""Room 2: where is a token? One policy per answer."""

from softattn_lm.position.base import Position, Rotation

__all__ = ["Position", "Rotation"]
