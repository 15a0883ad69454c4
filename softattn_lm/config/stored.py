"""A config that was stored, in a run folder or a checkpoint: it may come from a stranger, so it is data and no more.

    plain        mappings with text keys, lists, text, numbers, true, false, null; not too deep and not too many
    classes      every `_target_`, at any depth, is one that the shipped yaml files name, in a group it belongs to
    no more      no other key of Hydra's (`_args_`, `_recursive_`, ...) and no interpolation, `${...}`

All this is asked before anything is resolved or imported. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from softattn_lm.config.allowed import allowed_targets, partial_targets, require_allowed
from softattn_lm.config.check import POLICIES, SECTIONS, check
from softattn_lm.config.custom import SHAPES
from softattn_lm.config.settings import LoggerSettings, TrainerSettings, TrainingSettings, TrainSettings
from softattn_lm.config.signature import signature
from softattn_lm.config.tree import config_folder, groups
from softattn_lm.errors import UserError

DEEPEST = 30  # levels of lists and mappings; ours have 5
MOST = 100_000  # values; ours have some hundred
# Texts that are taken as typed, and resolved nowhere: names and paths may hold any character.
AS_TYPED = re.compile(r"(^|\.)(path|name|target|runs|resume|fork|trust|validation_sets\.[^.]+)$")
_INDEX = re.compile(r"\[\d+\]")


def require_harmless(config: Any, where: str) -> dict[str, Any]:
    """`config` itself. Raises UserError, which names the file `where` and the key, for anything that is not allowed."""
    if not isinstance(config, dict):
        raise UserError(f"{where} should hold a mapping of settings, and holds {type(config).__name__}")
    waiting: list[tuple[str, Any, int]] = [("", config, 0)]
    seen = 0
    while waiting:
        path, value, depth = waiting.pop()
        seen += 1
        # An alias in yaml, or a shared list in a checkpoint, can stand for more values than any memory holds.
        if depth > DEEPEST or seen + len(waiting) > MOST:
            raise UserError(f"{where} nests more than settings do, at {path[:80]}; it is not read")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UserError(f"{where}: {path or 'the top level'} has the key {key!r:.80}, which is no text")
            _require_known(value, path, where)
            waiting += [(f"{path}.{key}" if path else key, item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", item, depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, str):
            if "${" in value and not AS_TYPED.search(path):
                raise UserError(f"{where}: {path}={value:.80} is an interpolation, and stored settings are resolved")
        elif value is not None and not isinstance(value, (bool, int, float)):
            raise UserError(f"{where}: {path} is a {type(value).__name__}, which is no setting")
    return config


def _require_known(node: dict[str, Any], path: str, where: str) -> None:
    """Of one mapping: its `_target_` is allowed here, and it has no other key that Hydra would act on."""
    for key in node:
        if key.startswith("_") and key not in ("_target_", "_partial_"):
            raise UserError(f"{where}: {path or 'the top level'} has the key {key:.80}, which no setting is called")
    if "_target_" not in node:
        return
    target = node["_target_"]
    try:
        require_allowed(path or "the top level", target)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    group = _INDEX.sub("", path).removesuffix(".layers").rpartition(".")[2]
    if group not in groups(config_folder()):
        raise UserError(f"{where}: {path} is no place for a class; it is not built")
    if target not in allowed_targets(config_folder() / group):
        raise UserError(f"{where}: {path}._target_ is {target}, which is no {group}; it is not built")
    if node.get("_partial_", False) is not (target in partial_targets()):
        raise UserError(f"{where}: {path}._partial_ is not as in the configs of softattn_lm")
    _require_complete(node, path, where, ("vocab_size",) if group == "model" else (*SHAPES, "roles"))


def _require_complete(node: dict[str, Any], path: str, where: str, handed: Collection[str]) -> None:
    """`handed`: what the code passes itself."""
    known = signature(node["_target_"])
    for name, parameter in known.parameters.items() if known else ():
        if parameter.required and name not in node and name not in handed:
            raise UserError(f"{where}: {path}.{name} is missing")


def stored_run(config: Any, where: str) -> dict[str, Any]:
    """The checked config of a run, as if it had been typed; whether the files are there that it names is asked when
    they are read. Raises UserError naming `where`.
    """
    config = require_harmless(config, where)
    for key in ("model", "data", "tokenizer", "optimizer", "schedule", *SECTIONS):
        if not isinstance(config.get(key), dict):
            raise UserError(f"{where} has no section {key}, so it is no config of a run")
    if "lr" not in config:
        raise UserError(f"{where} has no lr, so it is no config of a run")
    # A setting that came after the run was made has its default.
    config = _defaults(TrainSettings) | config
    for key, kind in (("training", TrainingSettings), ("trainer", TrainerSettings), ("logger", LoggerSettings)):
        config[key] = _defaults(kind) | config[key]
    return _checked(config, where)


def _defaults(kind: type) -> dict[str, Any]:
    found = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    made = {field.name: field.default_factory() for field in fields(kind) if field.default_factory is not MISSING}
    return found | made


def stored_model(config: Any, where: str) -> tuple[dict[str, Any], int]:
    """(checked node of the model, seed) of a stored config, of which nothing else is looked at but for harm."""
    config = require_harmless(config, where)
    if not isinstance(config.get("model"), dict):
        raise UserError(f"{where} has no section model, so it is no config of a run")
    checked = _checked({"model": config["model"], "seed": config.get("seed", 0)}, where)
    return checked["model"], checked["seed"]


def _checked(config: dict[str, Any], where: str) -> dict[str, Any]:
    for key in POLICIES:
        if key not in config["model"]:
            raise UserError(f"{where}: model.{key} is missing")
        if not isinstance(config.get(key, {}), dict):
            raise UserError(f"{where}: {key} is no {key}")
    try:
        return check(config, "TrainSettings", files=False)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
