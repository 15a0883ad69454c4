"""`benchmark generate`: greedy tokens per second of GPT-2-style models beside other libraries (see peers.py), a bare
loop and the limit, and of a Llama-style model beside theirs.

All have the same shape, prompt and number of new tokens, and a cache; the time is that of the whole call, reading the
prompt included. A batch continues one prompt: ours reads it once, the others once a sample, as they are built. Small
steps ours computes in one thread, so transformers is timed so as well, beside the threads it takes of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softattn_lm.commands import bare_training, peers, peers_writing
from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.comparison import Report, Row, interleaved, peak_memory, seconds_of
from softattn_lm.commands.limits import read_bandwidth
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.generate import generate, in_bfloat16
from softattn_lm.position.base import Position
from softattn_lm.position.learned import Learned
from softattn_lm.position.rotary import Rotary

VOCABULARY, CONTEXT, PROMPT, NEW = 65, 256, 16, 200
WINDOW, SHORT, LONG = 64, 256, 4096  # of the model that writes beyond its context


class Case(NamedTuple):
    """target: ours to transformers as it is. half: ours in bfloat16. one_thread: transformers also in one."""

    layers: int
    width: int
    batch: int
    target: float | None
    half: bool = False
    llama: bool = False
    one_thread: bool = False


CASES = [
    Case(4, 128, 1, 5.0, one_thread=True),
    Case(4, 128, 1, None, llama=True, one_thread=True),
    Case(6, 384, 1, 1.4),
    Case(6, 384, 1, 2.0, half=True),
    Case(4, 128, 16, 3.0, one_thread=True),
]


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table and writes every figure to `file`. Raises UserError without transformers."""
    report = peers.opened("generate", Report(vars(settings), file))
    rows = [_beyond_the_context(settings, report.found)]
    rows += [_compare(case, report, settings.repeats) for case in CASES]
    report.close(rows)


def gpt2_style(layers: int, width: int, position: type[Position] = Learned, window: int | None = None) -> DecoderLM:
    return bare_training.gpt2_style(_shape(layers, width), position, window).eval()


def _shape(layers: int, width: int) -> Shape:
    return Shape(layers, width, CONTEXT, 1, VOCABULARY)


def _compare(case: Case, report: Report, repeats: int) -> Row:
    layers, width, batch, target, half, llama, one_thread = case
    shape, prompt = _shape(layers, width), torch.ones(batch, PROMPT, dtype=torch.long)
    model = bare_training.llama_style(shape).eval() if llama else gpt2_style(layers, width)
    build = peers.transformers_llama if llama else peers.transformers_gpt2
    writers: dict[str, Callable[[], object]] = {
        "ours": partial(_write, in_bfloat16(model) if half else model, NEW, batch),
        **peers_writing.transformers_writers(build(shape), prompt, NEW, report),
    }
    if half:
        peer = build(shape).to(torch.bfloat16)
        writers["transformers, bfloat16"] = peers_writing.transformers_writer(peer, prompt, NEW)
    if one_thread:
        writers["transformers, one thread"] = peers_writing.in_one_thread(writers["transformers"])
    if batch == 1 and not half:
        writers |= peers_writing.other_writers(shape, prompt, NEW, llama)
    if not llama:
        writers["bare loop"] = partial(bare_loop, gpt2_style(layers, width), batch)
    tokens, read = NEW * batch, bytes_read(model, batch)
    rates = {name: partial(_rate, write, tokens) for name, write in writers.items()}
    found = interleaved({**rates, "limit": lambda: batch * read_bandwidth(read) / read}, repeats)
    name = f"{layers} x {width}, batch {batch}"
    name = f"Llama-style {name}" if llama else name
    name += ", ours in bfloat16" if half else ""
    ours_found, limit = found.pop("ours"), found.pop("limit")
    return Row(name, "tokens/s", ours_found, found, "transformers", target, limit)


def _rate(run: Callable[[], object], tokens: int) -> float:
    return tokens / seconds_of(run)


def _write(model: DecoderLM, new: int, batch: int) -> None:
    for _ in generate(model, [1] * PROMPT, max_new_tokens=new, temperature=0, n=batch):
        pass


def bytes_read(model: DecoderLM, batch: int) -> int:
    """In a step: every weight once, and each sample's cache half full. The limit is a step that does nothing else."""
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "position" not in name)
    return weights + batch * (PROMPT + NEW // 2) * model.cache_bytes_per_token()


@torch.inference_mode()
def bare_loop(model: DecoderLM, batch: int) -> Tensor:
    """The same model and tokens as plainly as torch can say it: functions of tensors, a cache made once, no class."""
    heads = _shape(model.n_layer, model.embed.embedding_dim).heads
    named = dict(model.named_parameters())
    cache = torch.zeros(model.n_layer, 2, batch, heads, CONTEXT, model.embed.embedding_dim // heads)
    layers = []
    for layer in range(model.n_layer):
        parts = ("attention_norm", "attention.projections.qkv", "attention.out", "mlp_norm", "mlp.up", "mlp.down")
        layers.append([named[f"blocks.{layer}.{part}.{kind}"] for part in parts for kind in ("weight", "bias")])

    def step(ids: Tensor, start: int) -> Tensor:
        end = start + ids.shape[1]
        x = F.embedding(ids, named["embed.weight"]) + named["positions.0.table"][start:end]
        for (g1, b1, qkv, qkv_b, out, out_b, g2, b2, up, up_b, down, down_b), (keys, values) in zip(
            layers, cache, strict=True
        ):
            h = F.linear(F.layer_norm(x, g1.shape, g1, b1), qkv, qkv_b)
            q, k, v = h.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            keys[:, :, start:end], values[:, :, start:end] = k, v
            y = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=start == 0)
            x = x + F.linear(y.transpose(1, 2).flatten(2), out, out_b)
            h = F.gelu(F.linear(F.layer_norm(x, g2.shape, g2, b2), up, up_b), approximate="tanh")
            x = x + F.linear(h, down, down_b)
        x = F.layer_norm(x[:, -1:], g1.shape, named["final_norm.weight"], named["final_norm.bias"])
        return F.linear(x, named["embed.weight"]).argmax(-1)

    text = [step(torch.ones(batch, PROMPT, dtype=torch.long), 0)]
    for start in range(PROMPT, PROMPT + NEW - 1):
        text.append(step(text[-1], start))
    return torch.cat(text, dim=1)


def _beyond_the_context(settings: BenchmarkSettings, found: dict[str, Any]) -> Row:
    """Seconds per token of a long text beside those of a short one; memory is what the process grew by."""
    model = gpt2_style(4, 128, Rotary, WINDOW)
    short, long = (partial(_write, model, new, 1) for new in (SHORT, LONG))
    short()
    before = peak_memory()
    long()
    found["long text grew the process by, bytes"] = grown = peak_memory() - before
    cases = {"long": partial(_rate, long, LONG), "short": partial(_rate, short, SHORT)}
    rates = interleaved(cases, settings.repeats)
    what = f"{SHORT} -> {LONG} new tokens, window {WINDOW}, {grown / 2**20:.1f} MiB more"
    return Row(what, "tokens/s", rates["long"], {f"{SHORT} tokens": rates["short"]}, f"{SHORT} tokens", 0.95)
