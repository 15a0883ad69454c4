"""No position at all: only the mask tells the past from the future. Haviv et al. 2022, arXiv:2203.16634."""

from softattn_lm.position.base import Position


class NoPosition(Position):
    """Adds nothing anywhere."""
