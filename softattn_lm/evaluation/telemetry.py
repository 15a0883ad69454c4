"""What each head of a model does with a fixed probe, from the q and k its kernel is handed in one forward pass.

    p = |A| / Σ|A| over the row      A itself for a softmax; it makes figures of kernels comparable whose rows sum to
                                     anything (sigmoid, ReLU, delta rule) or whose weights have a sign (differential)
    entropy, support                 of p, see attention_rows.py; means over rows
    entropy_ratio                    entropy / ln n, n = keys visible to the row
    logit_max, logit_abs_max         of scale · q kᵀ over visible keys, before soft cap and bias: what projections make
    logit_std                        √ of the mean over rows of the variance of logits over visible keys
    first, previous                  mean p of the first token, of the token before the row's own
    dead                             fraction of rows whose softmax Jacobian is below 1e-3 at A (at p if rows may sum to
                                     anything). The hard lookup is all dead by it: its gradient is not that of A.
    induction                        mean p of the token behind the earlier occurrence of the row's token, on random
                                     tokens said twice. Olsson et al. 2022, arXiv:2209.11895

Logits are of q and k as the kernel is handed them: for differential attention of whole vectors and not of either half,
for the delta rule of keys whose length is not yet taken out.
Rows with one visible key have no choice and are left out. Logits are None where q and k are not read, and whatever has
no row to be measured on is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from softattn_lm.data.windows import document_numbers
from softattn_lm.evaluation.attention_rows import DEAD, entropy, jacobian_norm, shares
from softattn_lm.evaluation.watching import Seen, evaluating, watched

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM

PROBE_WINDOWS = 8  # of text, and as many of repeated tokens
PROBE_TOKENS = 1024  # the most in a window, and about the most in either half of the probe: (T, T) weights are formed
FIGURES = (
    "entropy",
    "entropy_ratio",
    "support",
    "logit_max",
    "logit_abs_max",
    "logit_std",
    "first",
    "previous",
    "induction",
    "dead",
)


@dataclass(frozen=True)
class Probe:
    """tokens (B, T): `n_text` windows of text, and below them random ones that say their first `half` tokens twice.

    documents (B, T) for a model whose mask keeps them apart.
    """

    tokens: Tensor
    n_text: int
    half: int
    documents: Tensor | None = None


def make_probe(
    text: np.ndarray, context: int, vocab_size: int, documents: np.ndarray | None = None, seed: int = 0
) -> Probe:
    """The first windows of `text` (n,), which has a token at least. documents: where in the text they begin."""
    length = min(context, PROBE_TOKENS, len(text))
    n_text = max(1, min(PROBE_WINDOWS, PROBE_TOKENS // length, len(text) // length))
    places = np.arange(n_text * length).reshape(n_text, length)
    half = length // 2
    draw = np.random.default_rng(seed)
    # A token that stood twice in the half would have two earlier occurrences.
    once = [draw.choice(vocab_size, half, replace=half > vocab_size) for _ in range(n_text)]
    repeated = np.zeros((n_text, length), dtype=np.int64)
    repeated[:, : 2 * half] = np.tile(np.stack(once), 2)
    tokens = np.concatenate((text[places].astype(np.int64), repeated))
    packed = None
    if documents is not None:
        packed = torch.from_numpy(np.concatenate((document_numbers(documents, places), np.zeros_like(repeated))))
    return Probe(torch.from_numpy(tokens), n_text, half, packed)


def telemetry(model: DecoderLM, probe: Probe) -> list[dict[str, Any]]:
    """One row per layer and head: {"layer", "head", and a number or None for each of FIGURES}.

    Mode, gradients and random numbers of the model are left as they are.
    """
    rows: list[dict[str, Any]] = []

    def see(layer: int, seen: Seen) -> None:
        figures = head_figures(seen, probe)
        for head in range(seen.q.shape[1]):
            values = {name: None if name not in figures else float(figures[name][head]) for name in FIGURES}
            known = {name: x if x is not None and math.isfinite(x) else None for name, x in values.items()}
            rows.append({"layer": layer, "head": head, **known})

    device = model.embed.weight.device
    documents = None if probe.documents is None else probe.documents.to(device)
    with evaluating(model), watched(model, see):
        model(probe.tokens.to(device), documents=documents)
    return rows


def head_figures(seen: Seen, probe: Probe) -> dict[str, Tensor]:
    """(H,) each, NaN where there is no row; without logits if the kernel reads none."""
    a, n_text = seen.weights(), probe.n_text
    readable = seen.readable().expand(len(a), 1, *a.shape[-2:])[:n_text]
    count = readable.sum(-1)  # (B, 1, T)
    rows = count > 1
    p = shares(a)
    text = p[:n_text]

    def mean(values: Tensor) -> Tensor:
        return torch.where(rows, values, 0.0).sum((0, 2)) / rows.sum()

    h = entropy(text)  # (B, H, T)
    passed = a[:n_text] if seen.kernel.rows_sum_to != "anything" else text
    found = {
        "entropy": mean(h),
        "entropy_ratio": mean(h / count.clamp_min(2).double().log()),
        "support": mean(h.exp()),
        "first": mean(text[..., 0]),
        "previous": mean(torch.nn.functional.pad(text.diagonal(-1, -2, -1), (1, 0))),
        "dead": mean((jacobian_norm(passed) < DEAD).double()),
    }
    if probe.half > 1:
        found["induction"] = p[n_text:].diagonal(1 - probe.half, -2, -1)[..., 1 : probe.half + 1].mean((0, 2))
    if seen.kernel.reads_scores:
        logits, seen_by_row = seen.logits()[:n_text], readable & rows[..., None]
        found["logit_max"] = logits.masked_fill(~seen_by_row, -torch.inf).amax((0, 2, 3))
        found["logit_abs_max"] = logits.abs().masked_fill(~seen_by_row, -torch.inf).amax((0, 2, 3))
        middle = torch.where(readable, logits, 0.0).sum(-1, keepdim=True) / count[..., None].clamp_min(1)
        squares = torch.where(readable, logits - middle, 0.0).square().sum(-1)
        found["logit_std"] = mean(squares / (count - 1).clamp_min(1)).sqrt()
    return found


def per_layer(rows: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    """The rows of one step -> the figures of each layer: means over its heads, the largest logit that of all."""
    found: dict[int, dict[str, float | None]] = {}
    for layer in sorted({row["layer"] for row in rows}):
        found[layer] = {}
        for name in FIGURES:
            values = [row[name] for row in rows if row["layer"] == layer and row[name] is not None]
            whole = max if name.endswith("_max") else _mean
            found[layer][name] = whole(values) if values else None
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
