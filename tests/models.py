"""Small models for tests: one function, so that no test spells out a decoder's thirty settings."""

from collections.abc import Callable
from typing import Any

import torch

from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.projections import Separate
from softattn_lm.attention.scale import InverseSqrt
from softattn_lm.attention.visibility import Causal
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.position.rotary import Rotary


def tiny_model(attention: Callable[..., Any] = SDPA, **settings: Any) -> DecoderLM:
    """2 layers of 4 heads over 32 components, context 16, 11 symbols; every setting can be given."""
    given: dict[str, Any] = {
        "vocab_size": 11,
        "context": 16,
        "n_layer": 2,
        "n_head": 4,
        "d_model": 32,
        "attention": attention,
        "scale": InverseSqrt,
        "position": Rotary,
        "mask": Causal(),
        "projections": Separate,
        **settings,
    }
    return DecoderLM(**given)


def shaken(model: DecoderLM, seed: int = 0) -> DecoderLM:
    """Every parameter moved off its start, so that gains of 1, smears of 0 and zero matrices take part in what is
    tested.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model
