"""Room 3: the decoder around the attention block, its initial values, and sampling from it. Plain torch."""

from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.generate import generate
from softattn_lm.model.parameters import ParameterRole

__all__ = ["DecoderLM", "ParameterRole", "generate"]
