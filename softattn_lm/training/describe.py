"""How large a model is and what a token costs, without training it."""

from __future__ import annotations

from typing import Any

from softattn_lm.model.decoder import Block, DecoderLM


def describe(model: DecoderLM, batch_size: int, steps: int) -> dict[str, Any]:
    """Counts, and floating point operations per training token:

        6 · (weights used in a product) + 12 · heads · head_dim · (mean number of keys read), for each layer

    2 per weight forwards and 4 backwards; scores and averages likewise, 2 products of head_dim for each key. Looking up
    an embedding is free, a tied one also reads out and is counted once. (Kaplan et al. 2020, arXiv:2001.08361, 2.1.)
    """
    by_role: dict[str, int] = {}
    for role in model.parameter_roles():
        by_role[role.role] = by_role.get(role.role, 0) + role.parameter.numel()
    parameters = sum(by_role.values())
    in_products = by_role.get("hidden", 0) + model.head.weight.numel()
    context = model.context
    keys = [
        sum(min(i, mask.span(context) + mask.sinks) for i in range(1, context + 1)) / context for mask in model.masks
    ]
    # heads · head_dim of each layer
    widths = [block.attention.out.in_features for block in model.modules() if isinstance(block, Block)]
    per_token = 6 * in_products + 12 * sum(width * read for width, read in zip(widths, keys, strict=True))
    return {
        "parameters": parameters,
        "parameters_by_role": by_role,
        "embedding_parameters": by_role.get("embedding", 0),
        "parameters_without_embeddings": parameters - by_role.get("embedding", 0),
        "vocab_size": model.vocab_size,
        "context": context,
        "n_layer": model.n_layer,
        "mean_visible_keys": sum(keys) / max(1, len(keys)),
        "flops_per_token": round(per_token),
        "steps": steps,
        "tokens_per_step": batch_size * context,
        "training_flops": round(per_token * batch_size * context * steps),
    }
