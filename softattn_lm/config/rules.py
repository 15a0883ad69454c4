"""Rules that no single annotation can state: ranges, sums, files that must be there. Plain arithmetic; no torch.

The constructors have the same ranges, for those who build without a command line; here they are answered before torch
is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from softattn_lm.errors import UserError

BUDGETS = ("steps", "tokens", "epochs")

Rule = tuple[str, Callable[[Any], bool]]  # what the value must be, and whether it is


def _from(least: int) -> Rule:
    return f"at least {least}", lambda value: value >= least


# Comparisons with nan are false, so nan breaks each of these.
_SOME: Rule = ("at least 0 and finite", lambda value: 0 <= value < math.inf)
_ABOVE_ZERO: Rule = ("above 0", lambda value: value > 0)
_POSITIVE: Rule = ("above 0 and finite", lambda value: 0 < value < math.inf)
_FINITE: Rule = ("a finite number", math.isfinite)
_FRACTION: Rule = ("between 0 and 1", lambda value: 0 <= value <= 1)
_BELOW_ONE: Rule = ("at least 0 and below 1", lambda value: 0 <= value < 1)
_SHARE: Rule = ("above 0 and at most 1", lambda value: 0 < value <= 1)

_RULES: dict[str, Rule] = {
    "seed": ("at least 0 and below 2^32", lambda value: 0 <= value < 1 << 32),
    # Positions have tables of this length; attention over more tokens is beyond what is built here.
    "model.context": ("at least 1 and at most 1,048,576", lambda value: 1 <= value <= 1 << 20),
    **dict.fromkeys(("model.n_layer", "mask.sinks", "training.sample_every"), _from(0)),
    "training.save_every": _from(0),
    # Beyond these a machine is only kept busy: with starting processes, with a first batch.
    "training.num_workers": ("at least 0 and at most 1,024", lambda value: 0 <= value <= 1 << 10),
    "batch_size": ("at least 1 and at most 1,048,576", lambda value: 1 <= value <= 1 << 20),
    **dict.fromkeys(("steps", "tokens", "max_new_tokens", "top_k", "n"), _from(1)),
    **dict.fromkeys(("model.n_head", "model.n_kv_head", "model.head_dim", "model.d_model"), _from(1)),
    **dict.fromkeys(("model.mlp_width", "mask.window", "attention.top"), _from(1)),
    **dict.fromkeys(("projections.rank", "projections.q_rank"), _from(1)),
    "model.short_conv": ("2 tokens or more, or 0 for none", lambda value: value == 0 or value >= 2),
    "projections.rope_dim": ("an even number from 0 on", lambda value: value >= 0 and value % 2 == 0),
    **dict.fromkeys(("attention.query_block", "attention.key_block", "trainer.num_nodes"), _from(1)),
    **dict.fromkeys(("training.accumulate", "training.val_every", "training.log_every"), _from(1)),
    "training.keep_steps": (
        "whole numbers from 0 on, or log",
        lambda value: value == "log" or all(step >= 0 for step in value),
    ),
    "tokenizer.vocab_size": ("at least 256, for every byte is a token", lambda value: value >= 256),
    **dict.fromkeys(("lr", "optimizer.lr", "epochs", "position.base"), _POSITIVE),
    **dict.fromkeys(("training.clip", "model.final_cap", "attention.soft_cap"), _ABOVE_ZERO),
    **dict.fromkeys(("scale.value", "scale.initial"), _FINITE),
    # model.dropout comes first: it feeds attention.dropout, and the one that was typed is named.
    **dict.fromkeys(("model.dropout", "attention.dropout", "data.val_fraction", "data.test_fraction"), _BELOW_ONE),
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2", "optimizer.momentum"), _BELOW_ONE),
    **dict.fromkeys(("optimizer.weight_decay", "optimizer.adam_weight_decay", "optimizer.eps"), _SOME),
    **dict.fromkeys(("optimizer.embedding", "optimizer.head", "optimizer.vector"), _SOME),
    **dict.fromkeys(("temperature", "schedule.warmup"), _SOME),
    **dict.fromkeys(("slots", "threads"), _from(1)),
    **dict.fromkeys(("smallest", "budget"), _POSITIVE),
    **dict.fromkeys(("schedule.final_fraction", "schedule.decay"), _FRACTION),
    **dict.fromkeys(("top_p", "min_p", "position.fraction"), _SHARE),
    "training.loss_chunk": ("at least 0, or null to have it chosen", lambda value: value >= 0),
    # What wandb takes.
    "logger.project": (
        "a name of 1 to 128 characters without / \\ # ? % and :",
        lambda name: 1 <= len(name) <= 128 and not set("/\\#?%:") & set(name),
    ),
    "logger.tags": ("names of 1 to 64 characters", lambda tags: all(1 <= len(tag) <= 64 for tag in tags)),
}


def check_rules(cfg: dict[str, Any], files: bool = True) -> None:
    """Raises UserError for the first rule that the config breaks; `files` that are not there are one."""
    for key, (says, holds) in _RULES.items():
        for typed, value in _values(cfg, key):
            if value is not None and not holds(value):
                raise UserError(f"{typed}={value}: {typed} must be {says}")
    if "steps" in cfg:
        _budget(cfg)
        _batch(cfg)
    if isinstance(cfg.get("model"), dict):
        _heads(cfg["model"])
        _latent(cfg["model"])
        _patterns(cfg, cfg["model"].get("n_layer"))
    for typed, sinks in _values(cfg, "mask.sinks"):
        window = typed.removesuffix("sinks") + "window"
        if sinks and dict(_values(cfg, "mask.window"))[window] is None:
            raise UserError(f"{typed}={sinks} needs a window to stand outside of; type {window}=64")
        _fits_context(cfg, typed, sinks, window)
    if isinstance(cfg.get("data"), dict):
        _splits(cfg["data"])
    if files:
        _files(cfg)


def _values(cfg: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """(key as it is typed, value) of a dotted key; of a pattern over layers once per layer."""
    path, _, last = key.rpartition(".")
    node = cfg.get(path) if path else cfg
    if not isinstance(node, dict):
        return
    for choice, layer in zip(node.get("pattern", []), node.get("layers", []), strict=False):
        yield f"{path}.options.{choice}.{last}", layer.get(last)
    yield key, node.get(last)


def _fits_context(cfg: dict[str, Any], typed: str, sinks: int | None, window: str) -> None:
    context = (cfg.get("model") or {}).get("context")
    width = dict(_values(cfg, "mask.window"))[window]
    if sinks and context is not None and sinks + width > context:
        raise UserError(
            f"{typed}={sinks} and {window}={width} are together beyond model.context={context}, so nothing would be "
            f"hidden; type {window}={max(1, context // 2 - sinks)}"
        )


def _patterns(cfg: dict[str, Any], n_layer: int | None) -> None:
    """A part of a pattern that no layer reaches was meant for something."""
    for group, node in cfg.items():
        pattern = node.get("pattern") if isinstance(node, dict) else None
        if n_layer and isinstance(pattern, list) and len(pattern) > n_layer:
            raise UserError(
                f"{group}.pattern names {len(pattern)} layers, but model.n_layer={n_layer}, so its end is never used; "
                f"shorten it, or type model.n_layer={len(pattern)}"
            )


def _splits(data: dict[str, Any]) -> None:
    val, test = data.get("val_fraction") or 0.0, data.get("test_fraction") or 0.0
    if val + test >= 1:
        raise UserError(
            f"data.val_fraction={val} and data.test_fraction={test} leave nothing to train on; together they must stay "
            "below 1"
        )


def _files(cfg: dict[str, Any]) -> None:
    """Files that the config names. A hub name is no path, and is looked up when it is needed."""
    data, tokenizer = cfg.get("data") or {}, cfg.get("tokenizer") or {}
    if "path" in data:
        require_there("data.path", data["path"])
    for name, path in (data.get("validation_sets") or {}).items():
        if isinstance(path, str):
            require_there(f"data.validation_sets.{name}", path)
    for setting, name, kind in (
        ("tokenizer.path", tokenizer.get("path"), "file; give a tokenizer.json, its folder, or a hub name"),
        ("data.name", data.get("name"), "folder; give a folder, or a hub name"),
    ):
        if name is not None and _is_local(name) and not _exists(name):
            raise UserError(f"{setting}={name}: no such {kind}")


def require_there(setting: str, path: str) -> None:
    """Raises UserError for a path that is not there. What a glob finds is seen when it is read."""
    if not set("*?[") & set(path) and not _exists(path):
        # It looks for the nearest name; it brings numpy and tokenizers along, so it is imported for a fault only.
        from softattn_lm.data.paths import find_files

        find_files(path, setting)


def _is_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")


def _exists(path: str) -> bool:
    return os.path.exists(path) or os.path.exists(os.path.expanduser(path))


def _budget(cfg: dict[str, Any]) -> None:
    given = [key for key in BUDGETS if cfg.get(key) is not None]
    if not given:
        raise UserError("no budget: give one of steps=, tokens=, epochs=")
    if len(given) > 1:
        raise UserError(f"{' and '.join(f'{key}={cfg[key]}' for key in given)} are both a budget; give one of them")


def _batch(cfg: dict[str, Any]) -> None:
    accumulate = cfg["training"]["accumulate"]
    devices, hosts = cfg["trainer"]["devices"], cfg["trainer"]["num_nodes"]
    ranks = devices * hosts if isinstance(devices, int) and devices > 0 else hosts
    if isinstance(devices, int) and devices < 1:
        raise UserError(f"trainer.devices must be at least 1, or auto for all, but {devices} came")
    parts = accumulate * ranks
    if cfg["batch_size"] % parts:
        upper = (cfg["batch_size"] // parts + 1) * parts
        raise UserError(
            f"batch_size={cfg['batch_size']} does not divide into {parts} parts "
            f"({ranks} devices x training.accumulate={accumulate}); type batch_size={upper}"
        )


def _heads(model: dict[str, Any]) -> None:
    d_model, n_head, head_dim = model.get("d_model"), model.get("n_head"), model.get("head_dim")
    if d_model is None or n_head is None:
        return
    if head_dim is None and d_model % n_head:
        divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
        closest = min(divisors, key=lambda n: abs(n - n_head))
        raise UserError(
            f"model.d_model={d_model} does not divide into model.n_head={n_head} heads; "
            f"type model.n_head={closest}, or give model.head_dim"
        )
    n_kv_head = model.get("n_kv_head") or n_head
    if n_head % n_kv_head:
        raise UserError(
            f"model.n_head={n_head} does not divide into model.n_kv_head={n_kv_head} groups; "
            f"type one of {', '.join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)}"
        )
    position = model.get("position")
    if isinstance(position, dict) and ".rotary." in str(position.get("_target_")):
        width = head_dim or d_model // n_head
        if _is_latent(model):
            return
        turned = round(width * (position.get("fraction") or 1.0))
        if turned % 2:
            raise UserError(
                f"position=rotary turns pairs of components, but {turned} of a head's {width} would turn; "
                "type an even model.head_dim, or another position"
            )


def _is_latent(model: dict[str, Any]) -> bool:
    return ".latent." in str((model.get("projections") or {}).get("_target_"))


def _latent(model: dict[str, Any]) -> None:
    """Its rotation turns a part of each head, and its cache has no room for what others add to keys or values."""
    if not _is_latent(model):
        return
    for setting, none in (("short_conv", "0"), ("value_residual", "false")):
        if model.get(setting):
            raise UserError(
                f"projections=latent caches what keys and values are made of, and model.{setting}="
                f"{str(model[setting]).lower()} changes them; type model.{setting}={none}, or projections=separate"
            )
    turned, position = model["projections"].get("rope_dim"), model.get("position") or {}
    if turned == 0 and ".rotary." in str(position.get("_target_")):
        raise UserError(
            "projections.rope_dim=0 leaves position=rotary nothing to turn; type an even projections.rope_dim, or "
            "position=none"
        )
