"""softattn_lm: train small language models around a swappable causal attention, and see what attention buys.

Letters in shapes, everywhere:
    B batch, H query heads, G key/value heads, T new tokens, S visible tokens (past + new),
    D head width, C model width, V vocabulary, E width of whatever a kernel caches beside keys and values.
"""

__version__ = "0.1.0"
