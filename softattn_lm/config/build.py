"""Builds objects from config nodes: the one place where a name in a config becomes a class."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from softattn_lm.config.allowed import require_allowed
from softattn_lm.config.check import check_node, nodes
from softattn_lm.errors import UserError


def build(node: dict[str, Any], **given: Any) -> Any:
    """The object of `node["_target_"]`, made from the other keys of the node and from `given`, which wins.

    Nodes inside it are built first; `_partial_: true` gives a function that waits for more arguments. Every class
    named anywhere in the node is compared with the allow-list, and every value with its annotation, before the first
    import. Strings stay as they are: `${...}` is resolved nowhere. Hydra's `instantiate` does more than that (it
    resolves, and hides a constructor's error inside its own), so it is not used.

    Raises UserError for a class that no shipped config names, an unknown key or a value of the wrong type.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"a config node without _target_ cannot be built: {node!r}")
    for path, inner in nodes(node):
        require_allowed(path or "node", inner["_target_"])
    name = node["_target_"].rpartition(".")[2]
    return _make(check_node(name, node, given=given), given)


def _make(value: Any, given: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_make(item, {}) for item in value]
    if not isinstance(value, dict):
        return value
    arguments = {key: _make(item, {}) for key, item in value.items() if key not in ("_target_", "_partial_")} | given
    if "_target_" not in value:
        return arguments
    module, _, name = value["_target_"].rpartition(".")
    kind = getattr(import_module(module), name)
    return partial(kind, **arguments) if value.get("_partial_") else kind(**arguments)
