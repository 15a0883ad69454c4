"""A model and a text -> its likelihood, in windows of the model's context that follow each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from softattn_lm.data.windows import document_numbers, validation_windows
from softattn_lm.evaluation.likelihood import Likelihood, LikelihoodResult
from softattn_lm.evaluation.watching import evaluating

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM


def measure(
    model: DecoderLM, tokens: np.ndarray, n_bytes: int, batch_size: int, documents: np.ndarray | None = None
) -> LikelihoodResult:
    """`tokens` (n,): every one but the first is predicted once, from those before it in its window. `n_bytes` of its
    text; `documents`: where documents begin.

    The model is in eval mode while this runs and gets its mode back. Raises UserError if there is nothing to predict.
    """
    device, likelihood = model.embed.weight.device, Likelihood()
    windows = validation_windows(tokens, model.context, batch_size)
    with evaluating(model):
        for index, (x, y) in enumerate(windows):
            packed = None
            if documents is not None and model.packs_documents:
                packed = torch.from_numpy(document_numbers(documents, windows.places(index))).to(device)
            logits = model(torch.from_numpy(x).to(device), documents=packed)
            likelihood.add(logits, torch.from_numpy(y).to(device))
    return likelihood.result(n_bytes / len(tokens) if n_bytes else None)
