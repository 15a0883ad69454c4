"""What a run must have to be trained on: a checkpoint whole in what training alone reads, settings that are still those
it was saved with, and the record up to it. Asked before anything is written.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from softattn_lm.config.stored import stored_model, stored_run
from softattn_lm.errors import UserError
from softattn_lm.runs.changes import RESUMABLE
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.names import run_name
from softattn_lm.training.checkpoints import in_model_order
from softattn_lm.training.untrusted import require_fitting

# Of a run's settings, what may differ: the above, where things lie (the text is known by its fingerprint), and names.
MAY_DIFFER = (
    *RESUMABLE,
    *("runs", "name", "fork", "resume", "describe", "trust", "ablation"),
    *("data.path", "data.validation_sets", "tokenizer.path"),
)
# Of lightning 2.6's fit loop, what it cannot be restored without.
LOOPS = (
    "state_dict",
    "epoch_loop.state_dict",
    "epoch_loop.batch_progress",
    "epoch_loop.scheduler_progress",
    "epoch_loop.automatic_optimization.state_dict",
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.state_dict",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.val_loop.state_dict",
    "epoch_loop.val_loop.batch_progress",
    "epoch_progress",
)


def require_trainable(checkpoint: dict[str, Any], path: Path) -> None:
    """Raises UserError unless what training goes on from, beside weights and config, has the form in which we write it,
    and says everywhere that the same number of steps is done.
    """
    own, step = checkpoint["softattn"], checkpoint["softattn"]["step"]
    best = own.get("best")
    sound = {
        "seconds": _is_number(own.get("seconds")) and own["seconds"] >= 0,
        "best": type(best) is dict and (not best or (_is_number(best.get("loss")) and type(best.get("step")) is int)),
        "unvalidated": type(own.get("unvalidated", False)) is bool,
        "skipped": type(own.get("skipped", 0)) is int,
        "validation_sets": type(own.get("validation_sets", {})) is dict,
        "callbacks": checkpoint.get("callbacks") == {},
        "lr_schedulers": checkpoint.get("lr_schedulers") == [],
        "pytorch-lightning_version": re.fullmatch(r"\d+\.\d+[\w.+]*", str(checkpoint.get("pytorch-lightning_version"))),
        "optimizer_states": _are_states(checkpoint.get("optimizer_states")),
        "parent": re.fullmatch(r".*@[0-9]+", str(own.get("parent", "run@0")), re.DOTALL),
        "loops": _are_loops(checkpoint.get("loops")),
    }
    for name, holds in sound.items():
        if not holds:
            raise UserError(f"{path} is damaged: its {name} cannot be what a run saved, so no training goes on from it")
    # A fork may begin with another optimizer, and a step left out leaves no state behind.
    if step - _began(own.get("parent")) > own.get("skipped", 0) and not checkpoint["optimizer_states"][0]["state"]:
        raise UserError(f"{path} is damaged: its optimizer has no state, so no training goes on from it")
    loop = checkpoint["loops"]["fit_loop"]
    stepped = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"].get("completed")
    for other in (checkpoint.get("global_step"), loop["epoch_loop.state_dict"].get("_batches_that_stepped"), stepped):
        if other != step:
            raise UserError(f"{path} is damaged: it says that {step} steps were done, and elsewhere {other!r:.40}")


def _began(parent: str | None) -> int:
    """The step at which a run's own training begins, from the run@step it was forked from."""
    return int(parent.rpartition("@")[2]) if parent is not None else 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_states(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 1
        and type(value[0]) is dict
        and type(value[0].get("state")) is dict
        and all(type(entry) is dict for entry in value[0]["state"].values())
        and type(value[0].get("param_groups")) is list
        and all(type(group) is dict and type(group.get("params")) is list for group in value[0]["param_groups"])
    )


def _are_loops(value: Any) -> bool:
    loop = value.get("fit_loop") if type(value) is dict else None
    if type(loop) is not dict or any(type(loop.get(key)) is not dict for key in LOOPS):
        return False
    optimizer = loop["epoch_loop.automatic_optimization.optim_progress"].get("optimizer")
    if type(optimizer) is not dict or any(type(optimizer.get(key)) is not dict for key in ("step", "zero_grad")):
        return False
    progress = [loop[key] for key in LOOPS if key.endswith("progress") and not key.endswith("optim_progress")]
    parts = [each.get(key) for each in (*progress, *optimizer.values()) for key in ("total", "current")]
    return all(type(part) is dict and all(type(count) is int for count in part.values()) for part in parts)


def require_same_settings(saved: dict[str, Any], cfg: dict[str, Any], checkpoint: Path) -> None:
    """Raises UserError where config.yaml says something else than the checkpoint about what was learned with: some of
    it would be taken up and some not, such as lr, which the optimizer has in its state.
    """
    where, run = checkpoint.parent.parent / "config.yaml", checkpoint.parent.parent
    before, now = _flat(stored_run(saved, str(checkpoint))), _flat(stored_run(cfg, str(where)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not any(key == own or key.startswith(f"{own}.") for own in MAY_DIFFER):
            raise UserError(
                f"{where} says {key}={now.get(key, 'nothing')!s:.80}, and the run was saved with "
                f"{before.get(key, 'nothing')!s:.80}; put that back, or type fork={run_name(run)}@last with what is to "
                "change"
            )


def _flat(node: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> value that is no mapping, or an empty one."""
    if not isinstance(node, dict) or not node:
        return {key: node}
    found: dict[str, Any] = {}
    for name, item in node.items():
        found |= _flat(item, f"{key}.{name}" if key else name)
    return found


def require_weights(checkpoint: dict[str, Any], vocab_size: int, path: Path) -> None:
    """Raises UserError unless the weights are those of the checkpoint's own config."""
    node, seed = stored_model(checkpoint["softattn"]["config"], str(path))
    weights = {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}
    require_fitting(node, {"vocab_size": vocab_size, "seed": seed}, weights, path)


def require_optimizer(checkpoint: dict[str, Any], model: nn.Module, optimizer: Optimizer, where: str) -> None:
    """Raises UserError unless the state of the optimizer is one of these parameters. `optimizer`: a fresh one.
    `where` names the checkpoint.
    """
    saved = checkpoint["optimizer_states"][0]
    fresh = in_model_order(optimizer.state_dict(), optimizer, model)
    if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in fresh["param_groups"]]:
        raise UserError(f"{where} is damaged: its optimizer is one of other parameters")
    for group, made in zip(saved["param_groups"], fresh["param_groups"], strict=True):
        for name in ("initial_lr", *(name for name, value in made.items() if _is_number(value))):
            if not _is_number(group.get(name)):
                raise UserError(f"{where} is damaged: {name} of its optimizer is no number")
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    for number, state in saved["state"].items():
        for name, value in state.items():
            whole = type(number) is int and 0 <= number < len(shapes) and type(value) is Tensor
            if not whole or value.is_meta or tuple(value.shape) not in ((), shapes[number]):
                raise UserError(f"{where} is damaged: {name!s:.40} of its optimizer does not fit weight {number!s:.40}")


def missing_rows(folder: Path, step: int, parent: str | None) -> str | None:
    """What to say where metrics.jsonl lacks steps that the checkpoint of `step` has behind it; None if it lacks none.

    parent: the run@step of a fork, whose record begins there.
    """
    there = {row["step"] for row in read_metrics(folder) if row["kind"] == "train"}
    missing = [each for each in range(_began(parent) + 1, step + 1) if each not in there]
    if not missing:
        return None
    return (
        f"{folder / 'metrics.jsonl'} has no rows of {len(missing)} of the steps that were done, the first of which is "
        f"{missing[0]}; the run goes on without them"
    )
