"""The validation of a run: which sets it measures, how many windows at once, and what is told of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from softattn_lm.data import Prepared
from softattn_lm.data.tasks import FixedSet
from softattn_lm.evaluation.likelihood import LikelihoodResult
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.training.lit import ValidationSet

# Per forward pass and device. Large enough to be quick, small enough for the logits of a large vocabulary: no result
# depends on it beyond rounding.
VALIDATION_TOKENS = 4096
VALIDATION_LOGITS = 2**26  # of them at most, where the vocabulary is large


def windows_at_once(model: DecoderLM) -> int:
    """Of a validation batch."""
    return max(1, min(VALIDATION_TOKENS, VALIDATION_LOGITS // model.vocab_size) // model.context)


def validation_set(prepared: Prepared, name: str) -> ValidationSet:
    split = prepared.splits[name]
    bytes_per_token = split.n_bytes / split.n_tokens if split.n_bytes else None
    return ValidationSet(name, bytes_per_token, isinstance(split, FixedSet))


def validation_figures(result: LikelihoodResult) -> dict[str, Any]:
    found = asdict(result)
    return {
        "loss": found["nats_per_token"],
        "loss_se": found["standard_error"],
        "perplexity": result.perplexity,
        "bits_per_byte": found["bits_per_byte"],
        **({} if found["accuracy"] is None else {"accuracy": found["accuracy"]}),
        "tokens": found["tokens"],
    }
