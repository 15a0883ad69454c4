"""`fork=<run>@<step>`: a new run that begins as a kept checkpoint of another, with other settings.

The parent's checkpoint becomes the new run's `last`, under the new settings, before the run begins; from then on it is
a run like any other, which is continued, moved and sampled from without its parent. Steps are counted on: fork=a@1000
with steps=1500 trains 500 steps more, on the batches from 1000 on. What is taken over:

    weights      always; a fork keeps model, tokenizer and layout of the parent
    optimizer    its state, where the new run has the same kind; rates, decay and betas are the new ones
    rows         none: metrics.jsonl begins behind the step, tokens and seconds count on
"""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from softattn_lm.errors import UserError
from softattn_lm.runs.find import find_run
from softattn_lm.runs.names import run_name
from softattn_lm.training.checkpoint import read_checkpoint
from softattn_lm.training.checkpoints import in_model_order, step_name, whole_step
from softattn_lm.training.continued import require_trainable


def split(fork: str) -> tuple[str, str]:
    """ "my-run@1000" -> ("my-run", "1000"). Without a step, or with last or best, it is that checkpoint."""
    run, at, step = fork.rpartition("@")
    if at and (step in ("last", "best") or _is_step(step)):
        return run, step
    if at and not Path(fork).exists():
        raise UserError(f"fork={fork}: behind @ stands a step, last or best, such as fork={run or 'my-run'}@1000")
    return fork, "last"


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdigit()  # ² is a digit as well, and no number


def read_parent(fork: str, runs: str) -> tuple[dict[str, Any], str]:
    """The checkpoint that `fork` means, and its own name, "my-run@1000". Raises UserError with the steps there are."""
    run, step = split(fork)
    folder = find_run(run, runs)
    kept = _kept(folder)
    for path, number in kept.items():
        if step == path.stem or (_is_step(step) and int(step) == number):
            checkpoint = read_checkpoint(path)
            require_trainable(checkpoint, path)
            return checkpoint, f"{run_name(folder, runs)}@{number}"
    said = ", ".join(f"{number} ({path.stem})" if path.stem in ("last", "best") else str(number) for path, number
                     in sorted(kept.items(), key=lambda pair: pair[1]))  # fmt: skip
    there = f"kept are {said}" if kept else "it has saved no checkpoint yet"
    raise UserError(
        f"fork={fork}: run {run_name(folder, runs)} keeps no checkpoint of step {step}; {there}; "
        "training.keep_steps= keeps more in a new run"
    )


def lost_last(folder: Path, runs: str) -> str | None:
    """What to say of a run whose checkpoint to go on from is gone: it has others, which come after `last`, but for a
    step 0. None where there is none."""
    name = run_name(folder, runs)
    others = [path for path in (folder / "checkpoints").glob("*.ckpt") if path.stem != step_name(0)]
    if not others:
        return None
    newest = newest_kept(folder)
    hint = "" if newest is None else f"; a new run goes on from what is kept: fork={name}@{newest}"
    return f"{folder / 'checkpoints' / 'last.ckpt'} is gone, so run {name} cannot be continued{hint}"


def newest_kept(folder: Path) -> int | None:
    """The largest step whose checkpoint can be read; None if there is none."""
    steps = []
    for path in (folder / "checkpoints").glob("*.ckpt"):
        with suppress(UserError):
            steps.append(int(read_checkpoint(path)["softattn"]["step"]))
    return max(steps, default=None)


def _kept(folder: Path) -> dict[Path, int]:
    """Step of each checkpoint; those that do not say it in their name are read."""
    found: dict[Path, int] = {}
    for path in sorted((folder / "checkpoints").glob("*.ckpt")):
        number = path.stem.removeprefix("step-")
        found[path] = int(number) if number.isdigit() else read_checkpoint(path)["softattn"]["step"]
    return found


def planted(
    parent: dict[str, Any],
    name: str,
    contents: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    accumulate: int,
) -> dict[str, Any]:
    """The parent's checkpoint as the new run's: `contents` are the entries of "softattn" that never change in a run.

    Raises UserError for another model or tokenizer.
    """
    checkpoint = copy.copy(parent)
    own = parent["softattn"]
    _require_same(name, own, contents)
    step = own["step"]
    checkpoint["loops"] = {"fit_loop": whole_step(parent["loops"]["fit_loop"], step, accumulate)}
    checkpoint["optimizer_states"] = [_optimizer_state(parent, own["config"], contents["config"], model, optimizer)]
    checkpoint["softattn"] = {
        "format": own["format"],
        **contents,
        "step": step,
        "metrics": own["metrics"],
        "best": {},  # of this run
        "seconds": own["seconds"],
        "skipped": 0,
        "unvalidated": False,
        "parent": name,
    }
    return checkpoint


def _require_same(name: str, own: dict[str, Any], contents: dict[str, Any]) -> None:
    before, now = without_dropout(own["config"]["model"]), without_dropout(contents["config"]["model"])
    other = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if other:
        raise UserError(
            f"fork={name}: a fork keeps the model of its parent, and model.{other[0]} differs; type the same, or start "
            "a new run"
        )
    if own["tokenizer"] != contents["tokenizer"]:
        raise UserError(
            f"fork={name}: the tokenizer fitted on this text is another than the parent's, whose tokens its weights "
            "stand for; use the parent's text, or a run with tokenizer=byte"
        )


def without_dropout(node: Any) -> Any:
    """Settings of a model without those that change no weight's shape or meaning."""
    if isinstance(node, dict):
        return {key: without_dropout(value) for key, value in node.items() if key != "dropout"}
    return [without_dropout(value) for value in node] if isinstance(node, list) else node


def _optimizer_state(
    parent: dict[str, Any], before: dict[str, Any], now: dict[str, Any], model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    fresh = in_model_order(optimizer.state_dict(), optimizer, model)
    if before["optimizer"]["_target_"] == now["optimizer"]["_target_"]:
        fresh["state"] = parent["optimizer_states"][0]["state"]
    return fresh
