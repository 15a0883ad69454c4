"""Packed documents: where each token stands in its own text, also when the text goes on from an earlier call."""

import torch
from torch import Tensor

from softattn_lm.attention.cache import KVCache


def continue_documents(documents: Tensor, cache: KVCache | None) -> Tensor:
    """(B, T) document numbers, equal ones contiguous -> (B, T) positions, which start at 0 with every document."""
    index = torch.arange(documents.shape[1], device=documents.device)
    opens = torch.ones_like(documents, dtype=torch.bool)
    opens[:, 1:] = documents[:, 1:] != documents[:, :-1]
    offset = torch.zeros_like(documents[:, :1])
    if cache is not None and "document" in cache.fixed:
        goes_on = documents[:, :1] == cache.fixed["document"]
        offset = torch.where(goes_on, cache.fixed["place"] + 1, 0)
    first = torch.where(opens, index, 0).cummax(dim=1).values  # where the run of each token begins
    places = index - first + torch.where(first == 0, offset, 0)
    if cache is not None:
        cache.fixed["document"], cache.fixed["place"] = documents[:, -1:].clone(), places[:, -1:].clone()
    return places
