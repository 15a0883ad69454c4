"""`benchmark cache`: what one layer remembers of a text while it is decoded, for softmax and what is smaller, side by
side. Every figure is the size of what a model of one layer (a hybrid: four, averaged) holds once it has read that much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.kernels.delta import Delta
from softattn_lm.attention.kernels.linear import Linear
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.latent import Latent
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.projections import Separate, SharedKV
from softattn_lm.attention.scale import InverseSqrt
from softattn_lm.attention.visibility import Causal
from softattn_lm.commands.comparison import Report
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.errors import UserError
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.position.rotary import Rotary

PROMPT, ONE_BY_ONE = 256, 8  # tokens per call while reading, and behind that how many as sampling does
LONGEST = 8192  # tokens; a longer text tells nothing new and takes minutes


def cases(settings: BenchmarkSettings) -> dict[str, dict[str, Any]]:
    """Name -> settings of a model."""
    groups = max(g for g in range(1, max(1, settings.heads // 4) + 1) if settings.heads % g == 0)
    hybrid = Pattern(["delta", "delta", "delta", "sdpa"], [Delta, Delta, Delta, SDPA])
    rank = 4 * settings.head_dim  # DeepSeek-V2, arXiv:2405.04434, section 2.1.4; its rotary part is half of a head
    return {
        "sdpa": {},
        f"sdpa, {groups} key heads of {settings.heads}": {"n_kv_head": groups},
        "sdpa, K = V": {"projections": SharedKV},
        f"sdpa, latent of {rank}": {"projections": partial(Latent, rank=rank)},
        f"sdpa, window {settings.window}": {"mask": Causal(settings.window)},
        "linear": {"attention": Linear},
        "delta": {"attention": Delta},
        "delta, delta, delta, sdpa": {"attention": hybrid, "n_layer": 4},
    }


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table and writes every figure to `file`."""
    if not _lengths(settings):
        raise UserError(f"lengths={settings.lengths} are all beyond the {LONGEST} tokens that are read here")
    report = Report(vars(settings), file)
    report.open()
    found, every = {}, cases(settings)
    for number, (name, case) in enumerate(every.items(), start=1):
        print(f"case {number} of {len(every)}: {name}", file=sys.stderr, flush=True)
        found[name] = measure(settings, case)
    report.found["bytes_per_layer"] = found
    report.close([], _table(found, settings))


def _lengths(settings: BenchmarkSettings) -> list[int]:
    return [length for length in settings.lengths if length <= LONGEST]


@torch.no_grad()
def measure(settings: BenchmarkSettings, case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one layer in float32 for one text: of each token, of what does not grow, and held after each length."""
    held = {}
    per_token = state = 0.0
    for length in _lengths(settings):
        model = _model(settings, length, case)
        cache = _read(model, length)
        held[str(length)] = cache.nbytes() / model.n_layer
        per_token, state = cache.bytes_per_token() / model.n_layer, cache.state_bytes() / model.n_layer
    return {"per_token": per_token, "constant": state, "held": held}


def _model(settings: BenchmarkSettings, context: int, case: dict[str, Any]) -> DecoderLM:
    make: Callable[..., DecoderLM] = DecoderLM
    defaults: dict[str, Any] = {
        "n_layer": 1,
        "attention": SDPA,
        "projections": Separate,
        "mask": Causal(),
        "position": Rotary,
        "scale": InverseSqrt,
    }
    sizes = {
        "vocab_size": 2,
        "context": context,
        "n_head": settings.heads,
        "d_model": settings.heads * settings.head_dim,
    }
    return make(mlp="none", **sizes, **defaults | case).eval()


def _read(model: DecoderLM, length: int) -> KVCache:
    cache, text = model.new_cache(), torch.zeros(1, length, dtype=torch.long)
    prompt, rest = text[:, :-ONE_BY_ONE], text[:, -ONE_BY_ONE:]
    for chunk in (*prompt.split(PROMPT, dim=1), *rest.split(1, dim=1)):
        if chunk.shape[1]:
            model(chunk, cache)
    assert cache.length == length
    return cache


def _table(found: dict[str, dict[str, Any]], settings: BenchmarkSettings) -> Table:
    shape = f"{settings.heads} heads of {settings.head_dim}"
    title = f"what a layer of {shape} remembers, float32"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("attention", no_wrap=True)
    for heading in ("bytes per token", "constant bytes"):
        table.add_column(heading, justify="right")
    for length in _lengths(settings):
        table.add_column(f"KiB after {length} tokens", justify="right")
    for name, figures in found.items():
        full = found["sdpa"]["held"]
        cells = [f"{held / 1024:,.0f} ({held / full[t]:.1%})" for t, held in figures["held"].items()]
        table.add_row(name, f"{figures['per_token']:,.0f}", f"{figures['constant']:,.0f}", *cells)
    return table
