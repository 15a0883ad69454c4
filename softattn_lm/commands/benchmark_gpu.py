"""`benchmark gpu`: GPT-2 124M on one CUDA device, in under 8 minutes, with torch and lightning alone.

    train    tokens/s at context 1024 in bfloat16, compiled, beside transformers compiled, if it is installed
    MFU      model FLOPs utilisation: tokens/s · operations per token / peak; see training/describe.py, which counts the
             keys that causal attention reads, and training/throughput.py for the dense bfloat16 rate that the maker
             states; of a device not listed there, the measured rate of products
    decode   tokens/s at batch 1 in bfloat16 by a CUDA graph of a compiled step, beside the time of reading all weights
             and what the cache holds, and beside a graph of the plain step, see benchmark_gpu_decode.py
    memory   of the loss in chunks and of layers computed twice, see benchmark_gpu_memory.py
    words    what a vocabulary of 50257 costs in training, beside 50304
    checks   flex and blockwise against formula, forwards and backwards; both graphs against the model

`python scripts/benchmark.py gpu` composes no settings and reads none. Without a CUDA device everything runs at a tiny
size on the CPU, which shows that it runs and says nothing else.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.blockwise import Blockwise
from softattn_lm.attention.kernels.flex import Flex
from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.visibility import Visibility
from softattn_lm.commands import bare_training
from softattn_lm.commands.agreement import ALLOWED, LeftOut, agrees, step_agrees, stirred, tokens_of, wait
from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.benchmark_gpu_decode import decode
from softattn_lm.commands.benchmark_gpu_memory import memory
from softattn_lm.commands.comparison import Row, interleaved, machine, seconds_of
from softattn_lm.commands.limits import gemm_rate
from softattn_lm.commands.peers import logits_of, transformers_gpt2
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.errors import UserError
from softattn_lm.model.graphed import GraphedDecode
from softattn_lm.runs.files import write_json
from softattn_lm.training.describe import describe
from softattn_lm.training.throughput import peak_flops, utilisation

GPT2, TINY = Shape(12, 768, 1024, 32, 50304), Shape(2, 64, 32, 2, 97)
CHECKED = replace(TINY, width=128)  # four heads, which a fault may mix
STEPS, TINY_STEPS = 10, 2  # timed, in each round
# experiment=gpt2_124m has the vocabulary of its tokenizer, which is odd, as that of TINY.
UNEVEN, TINY_EVEN = 50257, 96
MFU, AHEAD = 0.5, 1.15  # aimed at
REPEATS = 5
ENOUGH = 300.0  # seconds; what has not begun by then is left out


def main(file: Path | None = None) -> None:
    """Prints lines of text and writes every figure to `file`."""
    file = Path("runs", "benchmark", "gpu.json") if file is None else file
    file.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else "no CUDA device: a tiny model on the CPU, figures mean nothing"
    found: dict[str, Any] = {"machine": machine() | {"device": name}, "rows": [], "failed": {}, "left_out": []}
    print("  ".join(f"{key}: {value}" for key, value in found["machine"].items()), flush=True)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    for part in (checks, training, decoding, saving, vocabulary):
        if time.perf_counter() - began > ENOUGH:
            found["left_out"].append(part.__name__)
            print(f"{part.__name__} is left out, as {ENOUGH:.0f} s are over", flush=True)
            continue
        rows: list[Row] = []  # those that came before a failure, too
        try:
            for row in part(device):
                rows.append(row if cuda or row.against == ALLOWED else replace(row, target=None))
        except LeftOut as missing:
            found["left_out"].append(str(missing))
            print(missing, flush=True)
        except RuntimeError as error:  # out of memory, a kernel that does not compile: the other parts may do
            found["failed"][part.__name__] = str(error)
            print(f"{part.__name__} failed: {' '.join(str(error).split())[:300]}", flush=True)
        print("\n".join(line(row) for row in rows), flush=True)
        found["rows"] += [row.as_dict() for row in rows]
        found["seconds"] = time.perf_counter() - began
        write_json(file, found)  # whatever comes, this is kept
    print(f"{found['seconds']:.0f} s; all figures: {file}")
    wrong = [row["what"] for row in found["rows"] if row["reached"] is False and row["against"] == ALLOWED]
    if wrong or found["failed"]:
        raise UserError(f"on this device there went wrong: {', '.join([*wrong, *found['failed']])}")


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    main(file)


def line(row: Row) -> str:
    """One comparison as text."""
    peers = ", ".join(f"{name} {statistics.median(values):,.4g}" for name, values in row.peers.items())
    aimed = "" if row.target is None else f", target {row.bound} {row.target:g}: {'yes' if row.reached else 'NO'}"
    least, most = row.spread
    ours = statistics.median(row.ours)
    return f"{row.what}: {ours:,.4g} {row.unit}; {peers}; ratio {row.ratio:.3f} ({least:.3f} to {most:.3f}){aimed}"


def training(device: torch.device) -> list[Row]:
    """Tokens per second, and what share of the peak they are."""
    cuda = device.type == "cuda"
    shape, steps = (GPT2, STEPS) if cuda else (TINY, TINY_STEPS)
    model = bare_training.gpt2_style(shape).to(device)
    loops = {"ours": loop(model, model, shape, device)}
    try:
        peer: Any = transformers_gpt2(shape).to(device)
    except ImportError:
        print("transformers is not installed: nothing to compare training with", flush=True)
    else:
        loops["transformers"] = loop(peer, logits_of(peer), shape, device)
    for name, step in loops.items():
        print(f"{name}: first step {seconds_of(step):.0f} s, compiling included", flush=True)
        step()
    found = interleaved({name: partial(rate, step, steps, shape, device) for name, step in loops.items()}, REPEATS)
    per_token = describe(model, shape.batch, 1)["flops_per_token"]
    peak = peak_flops(device) or measured_peak(device)
    used = [utilisation(tokens, per_token, peak) for tokens in found["ours"]]
    what = f"MFU of {shape}, {per_token:.4g} operations per token, peak {peak:.4g}"
    most = peak / per_token
    peers = {name: rates for name, rates in found.items() if name != "ours"} or {"peak": [most] * REPEATS}
    (against,) = peers
    aimed = AHEAD if against == "transformers" else None
    return [
        Row(what, "of the peak", used, {"peak": [1.0] * REPEATS}, "peak", MFU),
        Row(f"training {shape}", "tokens/s", found["ours"], peers, against, aimed, most),
    ]


def loop(
    model: nn.Module, logits: Callable[[Tensor], Tensor], shape: Shape, device: torch.device
) -> Callable[[], Tensor]:
    """One optimizer step in bfloat16; on CUDA, forward pass and loss are one compiled graph, for both sides."""
    optimizer = bare_training.fused_adamw(model)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits(x).float().flatten(0, 1), y)

    computed = torch.compile(loss_of) if device.type == "cuda" else loss_of

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = computed(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), bare_training.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def rate(step: Callable[[], Tensor], steps: int, shape: Shape, device: torch.device) -> float:
    """Tokens per second; the device is waited for once."""
    wait(device)

    def several() -> None:
        for _ in range(steps):
            step()
        wait(device)

    return steps * shape.tokens / seconds_of(several)


def measured_peak(device: torch.device) -> float:
    """Operations per second of a product in bfloat16; the best of some."""
    if device.type == "cpu":
        return gemm_rate(size=256)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def product() -> None:
        torch.mm(a, a)
        wait(device)

    product()
    return 2 * 8192**3 / min(seconds_of(product) for _ in range(7))


def decoding(device: torch.device) -> Iterator[Row]:
    """Tokens per second of a text at batch 1."""
    return decode(GPT2 if device.type == "cuda" else TINY, device, REPEATS)


def saving(device: torch.device) -> list[Row]:
    """What the chunks of the loss and layers computed twice save, and cost."""
    shape = GPT2 if device.type == "cuda" else TINY
    return memory(bare_training.gpt2_style(shape).to(device), shape, device, REPEATS)


def vocabulary(device: torch.device) -> list[Row]:
    """Training with a vocabulary that is no multiple of 8, beside one that is."""
    cuda = device.type == "cuda"
    even, uneven = (GPT2, replace(GPT2, vocabulary=UNEVEN)) if cuda else (replace(TINY, vocabulary=TINY_EVEN), TINY)
    cases = {}
    for shape in (uneven, even):
        model = bare_training.gpt2_style(shape).to(device)
        step = loop(model, model, shape, device)
        print(f"vocabulary of {shape.vocabulary}: first step {seconds_of(step):.0f} s", flush=True)
        cases[str(shape.vocabulary)] = partial(rate, step, STEPS if cuda else TINY_STEPS, shape, device)
    ours, other = cases
    found = interleaved(cases, REPEATS)
    what = f"training, vocabulary of {ours}{', as experiment=gpt2_124m has it' if cuda else ''}"
    return [Row(what, "tokens/s", found[ours], {other: found[other]}, other)]


def checks(device: torch.device) -> list[Row]:
    """The largest difference from formula's y and gradients, over a typical entry; flex has no backward pass on a
    CPU.
    """
    cuda = device.type == "cuda"
    heads, length, width = (8, 512, 64) if cuda else (2, 48, 16)
    dtype = torch.bfloat16 if cuda else torch.float32
    q, k, v, dy = (torch.randn(2, heads, length, width, device=device) / 2 for _ in range(4))
    visible = Visibility(length, window=length // 4, device=device)

    def apply(kernel: AttentionKernel, dtype: torch.dtype, backward: bool) -> list[Tensor]:
        given = [x.to(dtype).requires_grad_(backward) for x in (q, k, v)]
        y = kernel.to(device)(*given, scale=width**-0.5, visible=visible)
        gradients = torch.autograd.grad(y, given, dy.to(dtype)) if backward else ()
        return [x.detach().float() for x in (y, *gradients)]

    exact = apply(Formula(heads), torch.float32, True)
    rows = []
    for name, kernel in (("flex", Flex(heads)), ("blockwise", Blockwise(heads))):
        ours = apply(kernel, dtype, cuda or name != "flex")
        rows.append(agrees(f"{name}, beside formula", ours, exact[: len(ours)], device))
    return [*rows, step_check(device)]


def step_check(device: torch.device) -> Row:
    """Of a small model, in float32."""
    model, tokens = stirred(bare_training.gpt2_style(CHECKED)).eval().to(device), tokens_of(CHECKED, 2, device)
    with torch.inference_mode():
        writer = GraphedDecode(model, batch=2)
    return step_agrees("graphed decoding, beside the model", writer, tokens)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    main()
