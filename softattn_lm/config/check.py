"""Compares a composed config with the signatures of what it goes to, before anything is imported or built."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from softattn_lm.config.allowed import require_allowed
from softattn_lm.config.nearest import meant
from softattn_lm.config.rules import check_rules
from softattn_lm.config.signature import Parameter, Signature, signature, signature_in_file
from softattn_lm.config.values import Mismatch, allowed, fit, item_annotation, literals, typed_instead
from softattn_lm.errors import UserError

SETTINGS = "softattn_lm.config.settings."
CUSTOM = "softattn_lm.config.custom.custom"
POLICIES = ("attention", "scale", "position", "mask", "projections")
SECTIONS = {"training": "TrainingSettings", "trainer": "TrainerSettings", "logger": "LoggerSettings"}


def check(cfg: dict[str, Any], settings: str, files: bool = True) -> dict[str, Any]:
    """The config with every number in the type its argument has (1e6 an int, 1 a float).

    `settings` names the class that types the top level; `files`: whether files that it names must be there. Raises
    UserError for the first thing that does not fit.
    """
    top = _known(SETTINGS + settings)
    checked: dict[str, Any] = {}
    # Single values before nodes: `lr=fast` also stands in the optimizer's node, but it was typed as lr.
    for key in sorted(cfg, key=lambda name: isinstance(cfg[name], dict)):
        value = cfg[key]
        if key in SECTIONS and isinstance(value, dict):
            checked[key] = check_arguments(key, value, _known(SETTINGS + SECTIONS[key]), given=())
        elif isinstance(value, dict) and "_target_" in value:
            checked[key] = check_node(key, value)
        else:
            checked |= check_arguments("", {key: value}, top, given=())
    cfg = {key: checked[key] for key in cfg}
    _policies_are_nodes(cfg.get("model"))
    check_rules(cfg, files)
    return cfg


def _policies_are_nodes(model: Any) -> None:
    for key in POLICIES if isinstance(model, dict) else ():
        node = model.get(key, {"_target_": None})
        if not isinstance(node, dict) or "_target_" not in node:
            raise UserError(
                f"model.{key}={shown(node)}: {key} is chosen as a whole; type {key}= and one of its choices"
            )


def check_node(path: str, node: dict[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """A node with a `_target_`: allowed, known keys only, values of the annotated types; so are the nodes inside it.

    `given` are arguments that the code passes itself. Whether all required arguments are there is the constructor's
    business, for some of them come later.
    """
    target = node.get("_target_")
    if target is None:
        return {key: check_node(f"{path}.{key}", v) if isinstance(v, dict) else v for key, v in node.items()}
    require_allowed(path, target)
    plain = {key: value for key, value in node.items() if key not in ("_target_", "_partial_")}
    marks = {key: value for key, value in node.items() if key in ("_target_", "_partial_")}
    checked = marks | check_arguments(path, plain, _known(target), given)
    if target == CUSTOM:
        checked["options"] = _check_options(f"{path}.options", node.get("target"), checked.get("options"))
    return checked


def check_arguments(path: str, values: dict[str, Any], known: Signature, given: Collection[str]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    names = [f"{path}.{name}" if path else name for name in known.parameters]
    for key, value in values.items():
        dotted = f"{path}.{key}" if path else key
        if not path and key in SECTIONS:
            raise UserError(f"{key}={shown(value)}: {key} is a section; set one of its keys, {key}.name=value")
        parameter = known.parameters.get(key)
        if parameter is None and not known.open and key not in given:
            hint = meant(dotted, names) or f"; there are {', '.join(names) or 'none'}"
            raise UserError(f"unknown setting {dotted}{hint}")
        item = item_annotation(parameter.annotation) if parameter else None
        if isinstance(value, dict) and item is not None and not any(nodes([*value.values(), value])):
            checked[key] = {k: _typed(f"{dotted}.{k}", v, Parameter(item, required=False)) for k, v in value.items()}
        elif isinstance(value, dict):
            checked[key] = check_node(dotted, _typed(dotted, value, parameter))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            _typed(dotted, value, parameter)
            paths = _typed_paths(path, key, values)
            checked[key] = [check_node(p, v) if isinstance(v, dict) else v for p, v in zip(paths, value, strict=True)]
        else:
            checked[key] = _typed(dotted, value, parameter)
    return checked


def _typed_paths(path: str, key: str, values: dict[str, Any]) -> list[str]:
    """How each item of a list is named on a command line; the layers of a pattern come from its choices' options."""
    names = values.get("pattern")
    if key == "layers" and isinstance(names, list) and len(names) == len(values[key]):
        return [f"{path}.options.{name}" for name in names]
    return [f"{path}.{key}[{index}]" for index in range(len(values[key]))]


def _check_options(path: str, target: Any, options: Any) -> Any:
    """Options of a person's own class, as far as its file says what they are; it is read, and not run."""
    known = signature_in_file(target) if isinstance(target, str) else None
    if known is None or not isinstance(options, dict):
        return options
    return {name: _typed(f"{path}.{name}", value, known.parameters.get(name)) for name, value in options.items()}


def _typed(dotted: str, value: Any, parameter: Parameter | None) -> Any:
    annotation = parameter.annotation if parameter else None
    try:
        return fit(value, annotation)
    except Mismatch:
        typed = f"{dotted}={shown(value)}"
        instead = typed_instead(value, annotation)
        if instead is not None:
            raise UserError(f"{typed}: type {dotted}={instead}") from None
        guess = meant(str(value), literals(annotation))
        raise UserError(f"{typed}: {dotted} must be {allowed(annotation)}{guess}") from None


def shown(value: Any) -> str:
    """A plain value as a person would type it."""
    if isinstance(value, list):
        return "[" + ",".join(shown(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _known(target: str) -> Signature:
    found = signature(target)
    if found is None:
        raise UserError(f"{target} is named in a config, but the package has no such class")
    return found


def nodes(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (path, node) with a `_target_` in a plain config, lists included."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield path, value
        for key, item in value.items():
            yield from nodes(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes(item, f"{path}[{index}]")
