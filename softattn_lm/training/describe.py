"""How large a model is and what a token costs, without training it."""

from __future__ import annotations

from typing import Any

from softattn_lm.model.decoder import DecoderLM


def describe(model: DecoderLM, batch_size: int, steps: int) -> dict[str, Any]:
    """Counts, and floating point operations per training token:

        6 · (weights used in a product) + 12 · heads · head_dim · (mean number of keys read), for each layer

    2 per weight forwards and 4 backwards; scores and averages likewise, 2 products of head_dim for each key. A state
    that is written and read once costs what head_dim keys do. Looking up an embedding is free, a tied one also reads
    out and is counted once. (Kaplan et al. 2020, arXiv:2001.08361, 2.1.)
    """
    by_role: dict[str, int] = {}
    for role in model.parameter_roles():
        by_role[role.role] = by_role.get(role.role, 0) + role.parameter.numel()
    parameters = sum(by_role.values())
    convolutions = [c for block in model.layers if (c := block.attention.convolution) is not None]
    convolved = sum(p.numel() for convolution in convolutions for p in convolution.parameters())
    in_products = by_role.get("hidden", 0) + model.head.weight.numel() + convolved
    context = model.context
    keys = [
        sum(min(i, mask.span(context) + mask.sinks) for i in range(1, context + 1)) / context for mask in model.masks
    ]
    per_token = 6.0 * in_products
    for block, read in zip(model.layers, keys, strict=True):
        kernel, width = block.attention.kernel, block.attention.out.in_features  # heads · head_dim
        head_dim = width // block.attention.n_head
        per_token += 12 * width * (kernel.state_products / 2 * head_dim if kernel.recurrent else read)
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
