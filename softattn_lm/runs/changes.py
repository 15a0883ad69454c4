"""The settings of a run that is continued or forked: the saved ones, and what was typed where that may change."""

from __future__ import annotations

import json
from typing import Any

from softattn_lm.errors import UserError

# What a continued run may change: how long it goes on, where it runs and what is written down; nothing that was learned
# with.
RESUMABLE = (
    "steps",
    "tokens",
    "epochs",
    "logger",
    "trainer",
    "training.val_every",
    "training.log_every",
    "training.throughput",
    "training.checkpoint_activations",
    "training.sample_every",
    "training.save_every",
    "training.keep_steps",
    "training.num_workers",
    "training.nonfinite",
    "training.max_skipped",
    "training.telemetry",
    "training.score",
)
_BUDGETS = ("steps", "tokens", "epochs")
_MODEL = ("model", "attention", "scale", "position", "mask", "projections", "tokenizer", "experiment")


def resumed_config(saved: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings a continued run goes on with: the saved ones, and `changes` (dotted key -> value) where they are
    allowed.

    A change to the value that is already there is no change. A new budget replaces the old one, in whatever unit.
    Raises UserError naming the first setting that may not change.
    """
    config = json.loads(json.dumps(saved))
    for key, value in changes.items():
        if key in ("resume", "describe", "trust"):
            continue
        if key == "runs":  # where the token files lie and other runs are; the run itself may have been moved
            config["runs"] = value
            continue
        if any(key == allowed or key.startswith(f"{allowed}.") for allowed in RESUMABLE):
            continue
        if _get(saved, key) != value:
            had = "" if isinstance(value, dict) else f" (the run has {_get(saved, key)}, you typed {value})"
            raise UserError(
                f"{key} cannot change when a run is continued{had}; allowed are {', '.join(RESUMABLE)}; "
                "start a new run instead"
            )
    if any(changes.get(key) is not None for key in _BUDGETS):
        for key in _BUDGETS:
            config[key] = changes.get(key)
    for key, value in changes.items():
        allowed = any(key == a or key.startswith(f"{a}.") for a in RESUMABLE)
        if allowed and key not in _BUDGETS:
            _put(config, key, value)
    return config


def forked_config(saved: dict[str, Any], changes: dict[str, Any], composed: dict[str, Any]) -> dict[str, Any]:
    """The settings of a new run that starts from another's checkpoint: the parent's, and `changes` as they are typed.

    What the weights stand for stays: model (its dropout apart), policies and tokenizer. `composed`: where a choice
    sets more than its own key, as optimizer=adamw sets lr. Raises UserError naming the first setting that may not
    change.
    """
    config = json.loads(json.dumps(saved))
    for key, value in changes.items():
        if key.split(".")[0] in _MODEL and key != "model.dropout":
            if _get(saved, key) != value:
                raise UserError(
                    f"{key} cannot change in a fork, which keeps the model and the tokenizer of its parent; "
                    "start a new run instead"
                )
        elif key not in ("resume", "describe", "trust", *_BUDGETS):
            _put(config, key, value)
    if "optimizer" in changes:
        config["lr"] = composed["lr"]
    if "optimizer.lr" not in changes:
        config["optimizer"]["lr"] = config["lr"]
    if "model.dropout" in changes:
        for key in ("model", "attention"):
            _replace_dropout(config[key], changes["model.dropout"])
    if any(changes.get(key) is not None for key in _BUDGETS):
        config |= {key: changes.get(key) for key in _BUDGETS}
    return config | {key: composed[key] for key in ("name", "runs", "fork")} | {"resume": None}


def _replace_dropout(node: Any, value: float) -> None:
    for key, item in node.items() if isinstance(node, dict) else ():
        if key == "dropout":
            node[key] = value
        for inner in item if isinstance(item, list) else [item]:
            _replace_dropout(inner, value)


def _get(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value
