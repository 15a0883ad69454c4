"""`benchmark train`: training tokens per second of GPT-2-style models, by `train` with its records and by a bare loop,
beside other libraries (see peers.py) in a bare loop and the rate of matrix products.

    limit   rate of a product of two 1024 x 1024 matrices, over the operations of a token (see training/describe.py)

`train` is the command, a process of its own on a text of 65 symbols, and its time is what metrics.jsonl says of the
steps behind the first few. It keeps freed memory (see training/memory.py), which the bare loops do not, as torch leaves
it. Bare loops of both sides are also compared Llama-style and compiled: see benchmark_train_loops.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from softattn_lm.commands import bare_training, peers
from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.benchmark_startup import TRAIN, answer
from softattn_lm.commands.benchmark_train_loops import compare_compiled, compare_llama, rate_of_loop
from softattn_lm.commands.comparison import Report, Row, interleaved, seconds_of
from softattn_lm.commands.limits import gemm_rate
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.raw import decode, encode
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.config.tree import config_folder
from softattn_lm.data.module import MicroBatches
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.new import new_run
from softattn_lm.training.describe import describe
from softattn_lm.training.muon import fast_bfloat16
from softattn_lm.training.prepared import prepared_data
from softattn_lm.training.run import train

WARM_UP = 3  # steps at the start of a run that are not timed, at least; half as many as are timed if that is more
APART, AGREE = 500, 0.01  # after so many steps bfloat16 may be so many nats from float32
LOADS = 50  # batches that are fetched to time one


class Case(NamedTuple):
    """targets: ours to transformers in float32, its share of the rate of products, train to the bare loop, and the
    share of a step that fetching a batch may take. half_ahead, half_faster: of bfloat16, ours to transformers under
    autocast, and to our float32. compiled: whether it is also compared so.
    """

    shape: Shape
    steps: int  # timed, in each round
    ahead: float
    of_products: float | None
    overhead: float
    half_ahead: float | None = None
    half_faster: float | None = None
    loading: float = 0.02
    compiled: bool = False


CASES = [
    Case(Shape(4, 128, 64, 12), 40, 1.45, None, 1.05, compiled=True),
    Case(Shape(6, 384, 256, 8), 3, 1.12, 0.80, 1.02, half_ahead=1.15, half_faster=1.7),
]


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table and writes every figure to `file`. Raises UserError without transformers."""
    report = peers.opened("train", Report(vars(settings), file))
    half = fast_bfloat16(torch.device("cpu"))
    if not half:
        report.console.print("This processor has no fast products in bfloat16: its rows are left out.")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text.txt")
        text.write_text(symbols(2**20), encoding="ascii")
        for case in CASES:
            rows += compare(case, Path(scratch), settings.repeats, half)
            rows.append(compare_llama(case.shape, case.steps, settings.repeats))
            if case.compiled:
                rows += say_compiled(case, Path(scratch), settings.repeats, report)
        if half:
            for case in CASES if settings.long else CASES[:1]:
                rows.append(agreement(case.shape, Path(scratch)))
    report.close(rows)


def say_compiled(case: Case, scratch: Path, repeats: int, report: Report) -> list[Row]:
    """No row, and a line that says why, where nothing can be compiled."""
    try:
        row, said = compare_compiled(case.shape, case.steps, scratch, repeats)
    except RuntimeError as error:
        peers.leave_uncompiled(report, "the compiled bare loop", error)
        return []
    report.found["compiled"] = said
    report.console.print(said, highlight=False)
    return [row]


def symbols(n: int) -> str:
    """`n` characters drawn from 65."""
    alphabet = np.frombuffer(bytes(range(ord("!"), ord("!") + 65)), dtype=np.uint8)
    return bytes(np.random.default_rng(0).choice(alphabet, n)).decode("ascii")


def compare(case: Case, scratch: Path, repeats: int, half: bool) -> list[Row]:
    """One size: float32, bfloat16 if `half`, and what the framework and fetching a batch add."""
    shape, steps = case.shape, case.steps
    per_token = describe(bare_training.gpt2_style(shape), shape.batch, steps)["flops_per_token"]
    cases: dict[str, Callable[[], float]] = {
        "train": partial(rate_of_train, shape, steps, scratch, "float32"),
        "products": partial(rate_of_products, per_token, torch.float32),
    }
    loops = {
        "transformers": peers.of_transformers(shape),
        **peers.of_others(shape),
        "bare loop": bare_training.ours(shape),
    }
    cases |= {name: partial(rate_of_loop, loop, shape, steps) for name, loop in loops.items()}
    if half:
        cases |= {
            "train, bfloat16": partial(rate_of_train, shape, steps, scratch, "bfloat16"),
            "products, bfloat16": partial(rate_of_products, per_token, torch.bfloat16),
            "transformers, autocast": partial(rate_of_loop, peers.of_transformers(shape, True), shape, steps),
        }
    found = interleaved(cases, repeats)
    ours, bare, limit, unit = found["train"], found["bare loop"], found["products"], "tokens/s"
    others = {name: found[name] for name in loops}
    rows = [Row(f"{shape}, float32", unit, ours, others, "transformers", case.ahead, limit)]
    if case.of_products is not None:
        rows.append(Row("  of the rate of products", unit, ours, {"products": limit}, "products", case.of_products))
    rows.append(Row("  train, beside a bare loop", unit, ours, {"bare loop": bare}, "bare loop", 1 / case.overhead))
    step, load = [shape.tokens / rate for rate in ours], seconds_of_a_batch(shape, scratch)
    rows.append(
        Row(
            "  fetching a batch, in a step", "s", [load] * len(step), {"step": step}, "step", case.loading,
            more_is_better=False,
        )
    )  # fmt: skip
    if half:
        ours_half, peer_half = found["train, bfloat16"], found["transformers, autocast"]
        half_limit = found["products, bfloat16"]
        others = {"transformers": peer_half}
        rows.append(Row(f"{shape}, bfloat16", unit, ours_half, others, "transformers", case.half_ahead, half_limit))
        others = {"float32": ours}
        rows.append(Row("  bfloat16, beside our float32", unit, ours_half, others, "float32", case.half_faster))
    return rows


def rate_of_products(per_token: float, dtype: torch.dtype) -> float:
    """Tokens per second, if nothing but the products of a token took time."""
    return gemm_rate(dtype) / per_token


def overrides(shape: Shape, scratch: Path, precision: str) -> list[str]:
    """What to compose for a GPT-2 of this shape on the text of 65 symbols."""
    return [
        "experiment=nanogpt_cpu", "trainer=cpu", "data=text_file", f"data.path={encode(str(scratch / 'text.txt'))}",
        "data.val_fraction=0", f"runs={encode(str(scratch / 'runs'))}", "training.telemetry=false",
        "training.sample_every=null", "model.bias=true", "model.mlp=gelu_tanh", f"model.n_layer={shape.layers}",
        f"model.n_head={shape.heads}", f"model.d_model={shape.width}", f"model.context={shape.context}",
        f"batch_size={shape.batch}",
        f"training.precision={precision}",
    ]  # fmt: skip


def configured(words: list[str]) -> dict[str, Any]:
    return check(compose("train", words, config_folder()), "TrainSettings")


def rate_of_train(shape: Shape, steps: int, scratch: Path, precision: str) -> float:
    """Tokens per second of the command's own steps, records and progress included."""
    name, warm_up = f"run{time.time_ns()}", max(WARM_UP, steps // 2)
    words = [decode(word) for word in overrides(shape, scratch, precision)]
    answer([*TRAIN, *words, f"steps={steps + warm_up}", f"name={name}"], 0)
    seconds = [row["seconds"] for row in read_metrics(scratch / "runs" / name) if row["kind"] == "train"]
    assert len(seconds) == steps + warm_up, len(seconds)
    return steps * shape.tokens / (seconds[-1] - seconds[warm_up - 1])


def seconds_of_a_batch(shape: Shape, scratch: Path) -> float:
    """In the process that trains, without workers."""
    prepared = prepared_data(configured(overrides(shape, scratch, "float32")))
    data = MicroBatches(prepared.splits["train"], shape.context, 0, "random", shape.batch, 1, 0, 1)
    data[0]
    return seconds_of(lambda: [data[index] for index in range(LOADS)]) / LOADS


def agreement(shape: Shape, scratch: Path) -> Row:
    """How far bfloat16 is from float32 after as many steps on the shipped novels, over the whole validation text."""
    losses = []
    for precision in ("float32", "bfloat16"):
        words = [word for word in overrides(shape, scratch, precision) if not word.startswith("data.")]
        words = [word if word != "data=text_file" else "data=austen" for word in words]
        cfg = configured([*words, f"steps={APART}", f"training.val_every={APART}"])
        summary = train(cfg, new_run(cfg["runs"], None, cfg), console=Console(quiet=True))
        losses.append(summary["validation"]["validation"]["loss"])
    apart = abs(losses[0] - losses[1])
    what = f"{shape}: float32 {losses[0]:.4f}, bfloat16 {losses[1]:.4f} after {APART} steps"
    return Row(what, "nats apart", [apart], {"allowed": [AGREE]}, "allowed", 1.0, more_is_better=False)
