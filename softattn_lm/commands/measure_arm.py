"""What one arm of an ablation costs, measured in a process of its own while nothing else of the ablation runs.

in    a yaml file {"config": the arm's settings, "lines": of the baseline, see measure_lines.py}
out   a json file: sizes (see training/describe.py), executed floating point operations per token (torch's counter,
      over a forward and backward pass), decode bytes per token, tokens/s, seconds per step and peak memory

An arm whose logits change when tokens behind them do reads what it is to predict, and is refused: its loss would be the
best of the table.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json

WARM_UP, LEAST, MOST = 2, 5, 200  # steps
SECONDS = 0.5  # of timed steps, if LEAST are done
FROM_AHEAD = 1e-3  # of a logit: what rounding may change in products of another split


def measure_arm(job: Path, out: Path) -> None:
    from softattn_lm.commands.measure_lines import write_lines
    from softattn_lm.commands.sweep import read_job

    cfg = read_job(str(job))
    found = measured(cfg)
    asked = yaml.safe_load(job.read_text(encoding="utf-8")).get("lines")
    if asked is not None:
        write_lines(cfg, asked)
    write_json(out, found)  # last: what was measured is not measured again


def measured(cfg: dict[str, Any]) -> dict[str, Any]:
    """One device of this machine, the arm's batch and context, on tokens of its own training text."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from softattn_lm.config.build import build
    from softattn_lm.config.settings import TrainerSettings, TrainingSettings
    from softattn_lm.data.module import TextDataModule
    from softattn_lm.training.budget import max_steps
    from softattn_lm.training.describe import describe
    from softattn_lm.training.loss import batch_loss, make_loss
    from softattn_lm.training.prepared import prepared_data

    trainer, training = TrainerSettings(**cfg["trainer"]), TrainingSettings(**cfg["training"])
    device = torch.device("cuda" if trainer.accelerator in ("auto", "gpu") and torch.cuda.is_available() else "cpu")
    prepared = prepared_data(cfg)
    steps = max_steps(cfg, prepared.splits["train"].n_tokens)
    resting = _memory(device, reset=True)
    model = build(cfg["model"], vocab_size=prepared.tokenizer.vocab_size, seed=cfg["seed"]).to(device)
    optimizer = build(cfg["optimizer"])(model.parameter_roles())
    data = TextDataModule(
        prepared, model.context, cfg["batch_size"], 1, cfg["seed"], cfg["data"].get("sampling", "permuted"),
        training.accumulate, documents=model.packs_documents,
    )  # fmt: skip
    batches = [[tensor.to(device) for tensor in batch] for batch in data.train_dataloader()]

    loss = make_loss(model.vocab_size, training.loss_chunk)
    model.recomputes = training.checkpoint_activations == "block"

    def passes() -> None:
        for batch in batches:
            batch_loss(model, batch, loss).backward()

    def step() -> None:
        passes()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    sizes = describe(model, cfg["batch_size"], steps)
    for _ in range(WARM_UP):
        step()
    spent: list[float] = []
    while len(spent) < LEAST or (sum(spent) < SECONDS and len(spent) < MOST):
        began = time.perf_counter()
        step()
        spent.append(time.perf_counter() - began)
    peak = _memory(device)
    tokens = batches[0][0][:2, : model.context]  # after some steps: at first, an output may be 0 whatever it reads
    for place, change in seen_ahead(model, tokens).items():
        if not change <= FROM_AHEAD:
            raise UserError(
                f"it reads the future: with other tokens behind position {place}, its logits up to there change by "
                f"{change:.2g}, and its loss would mean nothing; softattn check_attention names the property at fault"
            )
    with FlopCounterMode(display=False) as counter:
        passes()
    seconds = float(np.median(spent))
    return sizes | {
        "executed_flops_per_token": counter.get_total_flops() / sizes["tokens_per_step"],
        "decode_bytes_per_token": model.cache_bytes_per_token(),
        "decode_state_bytes": model.cache_state_bytes(),
        "seconds_per_step": seconds,
        "read_tokens": _read(prepared, steps, training.val_every),
        "tokens_per_second": sizes["tokens_per_step"] / seconds,
        "peak_memory_bytes": peak - (resting if device.type == "cpu" else 0),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "timed_steps": len(spent),
        "mlp_width": next((b.mlp.up.out_features for b in model.layers if b.mlp is not None), None),
    }


def _read(prepared: Any, steps: int, val_every: int) -> int:
    """Tokens that a run reads without learning from them: at its validations, and once of the test part."""
    tokens = {name: split.n_tokens for name, split in prepared.splits.items() if name != "train"}
    test = int(tokens.pop("test", 0))
    return test + math.ceil(steps / val_every) * int(sum(tokens.values()))


def seen_ahead(model: Any, tokens: Any) -> dict[int, float]:
    """(B, T) int64 -> position -> by how much logits up to there differ if every later token is another.
    Logits that are no numbers tell nothing here: such an arm diverges, and training says so.
    """
    import torch

    was_training, length = model.training, tokens.shape[1]
    model.eval()
    found = {}
    with torch.no_grad():
        logits = model(tokens)
        for place in sorted({0, length // 2, length - 2} & {*range(length - 1)}):
            others = tokens.clone()
            others[:, place + 1 :] = (others[:, place + 1 :] + 1) % model.vocab_size
            found[place] = float((model(others) - logits)[:, : place + 1].nan_to_num(0.0).abs().max())
    model.train(was_training)
    return found


def _memory(device: Any, reset: bool = False) -> int:
    """Bytes: the largest that were held since the last reset, of this process on a CPU (Linux; elsewhere since it
    began)."""
    import torch

    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if not status.is_file():
        from softattn_lm.commands.comparison import peak_memory

        return peak_memory()
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
