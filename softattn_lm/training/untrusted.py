"""Is a checkpoint file whole, plain and of the size that its config says? Asked before a model is built from it.

A stranger's file cannot run code (see config/stored.py), but it could still ask for more memory than there is: packed
entries, tensors that repeat one number, or a config with d_model=10**9 beside small weights.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softattn_lm.config.build import build
from softattn_lm.config.check import CUSTOM, nodes
from softattn_lm.config.custom import FAILURES
from softattn_lm.errors import UserError

# Entry of a checkpoint's "softattn" -> what it must be. Others may stand beside them.
ENTRIES = {"config": dict, "tokenizer": dict, "data": dict, "metrics": dict, "step": int}


def require_whole(path: Path) -> None:
    """Raises UserError for a file that is no zip, as torch.save writes it, or has an entry that is packed or damaged.

    torch does not compare the checksums that it writes, so a flipped bit would go unnoticed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            damaged = None if packed else archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(f"{path} cannot be read as a checkpoint, it may be cut short: {_first_line(error)}") from None
    if packed:
        raise UserError(f"{path} cannot be read as a checkpoint: {packed[0]} in it is packed, and torch packs nothing")
    if damaged is not None:
        raise UserError(f"{path} cannot be read as a checkpoint, it is damaged: {damaged} in it has another checksum")


def require_entries(checkpoint: dict[str, Any], path: Path) -> None:
    """Raises UserError unless what we read of a checkpoint has the types with which we write it."""
    own = checkpoint["softattn"]
    for key, kind in ENTRIES.items():
        if type(own.get(key)) is not kind:
            raise UserError(f"{path} is damaged: its entry {key} is {_what(own.get(key))}")
    if own["step"] < 0:
        raise UserError(f"{path} is damaged: it says that {own['step']} steps were done")
    for key in ("fingerprint", "source"):
        if type(own["data"].get(key)) is not str:
            raise UserError(f"{path} is damaged: data.{key} is {_what(own['data'].get(key))}")
    weights = checkpoint["state_dict"]
    if type(weights) is not dict or not weights:
        raise UserError(f"{path} is damaged: its weights are {_what(weights)}")
    for name, value in weights.items():
        if not isinstance(name, str) or type(value) is not Tensor or value.layout != torch.strided:
            raise UserError(f"{path} is damaged: its weight {name!r:.80} is {_what(value)}")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes() or value.is_quantized:
            raise UserError(f"{path} is damaged: its weight {name!r:.80} claims more numbers than there are")


def require_fitting(node: dict[str, Any], given: dict[str, Any], weights: dict[str, Tensor], path: Path) -> None:
    """Raises UserError unless the model of this config has just these weights. Takes no memory for the model.

    A model with code of a person's own, who has trusted it, is not looked at: such code may not stand a trial build.
    """
    n_layer = node.get("n_layer")
    if isinstance(n_layer, int) and n_layer > len(weights):
        raise UserError(f"{path}: the saved config has {n_layer} layers, and there are {len(weights)} weights")
    if any(inner["_target_"] == CUSTOM for _, inner in nodes(node)):
        return
    with torch.device("meta"):
        model = built(node, given, path)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    there = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise UserError(
                f"{path}: the weights do not fit the saved config: {name:.80} has shape {there.get(name, 'none')}, and "
                f"the config gives {wanted.get(name, 'none')}"
            )
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in weights.values()}
    smallest = min(value.element_size() for value in weights.values())
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    if n_parameters * smallest > sum(held.values()):
        raise UserError(f"{path}: the saved config needs {n_parameters:,} weights, more than the file holds")


def built(node: dict[str, Any], given: dict[str, Any], path: Path) -> Any:
    """The model of a stored config. Raises UserError where one of its parts refuses, in whatever way."""
    try:
        return build(node, **given)
    except FAILURES as error:
        raise UserError(f"{path}: no model can be built from the saved config: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _what(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
