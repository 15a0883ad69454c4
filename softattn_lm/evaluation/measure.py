"""A model and a text -> its likelihood, in windows of the model's context that follow each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from softattn_lm.data.windows import validation_windows
from softattn_lm.evaluation.likelihood import Likelihood, LikelihoodResult

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM


def measure(model: DecoderLM, tokens: np.ndarray, n_bytes: int, batch_size: int) -> LikelihoodResult:
    """`tokens` (n,): every one but the first is predicted once, from those before it in its window. `n_bytes` of its
    text.

    The model is in eval mode while this runs and gets its mode back. Raises UserError if there is nothing to predict.
    """
    device = model.embed.weight.device
    likelihood = Likelihood()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for x, y in validation_windows(tokens, model.context, batch_size):
                likelihood.add(model(torch.from_numpy(x).to(device)), torch.from_numpy(y).to(device))
    finally:
        model.train(was_training)
    return likelihood.result(n_bytes / len(tokens) if n_bytes else None)
