"""Compares a value from a config with the annotation of the argument it goes to."""

from __future__ import annotations

import ast
from typing import Any

_WORDS = {"no": "false", "off": "false", "n": "false", "yes": "true", "on": "true", "y": "true"}


MOST = 10**308  # no larger whole number is a float


class Mismatch(Exception):
    """The value fits no part of the annotation."""


def fit(value: Any, annotation: ast.expr | None) -> Any:
    """The value, an int made a float where a float is wanted and 1e6 made an int where an int is wanted.

    Raises Mismatch if the value is none of what the annotation allows.
    """
    parts = _parts(annotation)
    for convert in (False, True):
        for part in parts:
            matched, result = _fit_one(value, part, convert)
            if matched:
                return result
    raise Mismatch


def allows_null(annotation: ast.expr | None) -> bool:
    return any(isinstance(part, ast.Constant) and part.value is None for part in _parts(annotation))


def item_annotation(annotation: ast.expr | None) -> ast.expr | None:
    """X of dict[str, X]; None, which allows anything, for any other annotation."""
    for part in _parts(annotation):
        if _head(part) == "dict" and isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple):
            return part.slice.elts[1]
    return None


def allowed(annotation: ast.expr | None) -> str:
    """What the annotation allows, for a person: "a whole number or null", "one of layer, rms"."""
    texts = [_describe(part) for part in _parts(annotation)]
    return " or ".join(texts)


def typed_instead(value: Any, annotation: ast.expr | None) -> str | None:
    """What to type for a boolean that came as `no`: false."""
    names = {part.id for part in _parts(annotation) if isinstance(part, ast.Name)}
    return _WORDS.get(str(value).lower()) if "bool" in names else None


def literals(annotation: ast.expr | None) -> list[str]:
    return [str(v) for part in _parts(annotation) if _head(part) == "Literal" for v in _literal_values(part)]


def _parts(annotation: ast.expr | None) -> list[ast.expr]:
    if annotation is None:
        return [ast.Name("Any")]
    if isinstance(annotation, ast.BinOp):
        return [*_parts(annotation.left), *_parts(annotation.right)]
    if isinstance(annotation, ast.Subscript) and _head(annotation) == "Optional":
        return [*_parts(annotation.slice), ast.Constant(None)]
    return [annotation]


def _head(part: ast.expr) -> str:
    base = part.value if isinstance(part, ast.Subscript) else part
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""


def _literal_values(part: ast.expr) -> list[Any]:
    assert isinstance(part, ast.Subscript)
    items = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
    return [item.value for item in items if isinstance(item, ast.Constant)]


def _fit_one(value: Any, part: ast.expr, convert: bool) -> tuple[bool, Any]:
    if isinstance(part, ast.Constant) and part.value is None:
        return value is None, value
    head = _head(part)
    if head == "bool":
        return isinstance(value, bool), value
    if head == "str":
        return isinstance(value, str), value
    if head == "int":
        if convert and isinstance(value, float) and value.is_integer():
            return True, int(value)
        return isinstance(value, int) and not isinstance(value, bool), value
    if head == "float":
        if convert and isinstance(value, int) and not isinstance(value, bool):
            return abs(value) <= MOST, float(value) if abs(value) <= MOST else value
        return isinstance(value, float), value
    if head == "Literal":
        # `true == 1` in Python: the type must agree as well.
        return any(value == v and type(value) is type(v) for v in _literal_values(part)), value
    if head == "dict":
        return isinstance(value, dict), value
    if head in ("list", "Sequence"):
        if not isinstance(value, list):
            return False, value
        item = part.slice if isinstance(part, ast.Subscript) else None
        return True, [fit(v, item) for v in value]
    return True, value


def _describe(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return "null"
    head = _head(part)
    plain = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    if head in plain:
        return plain[head]
    if head == "Literal":
        values = [str(v) for v in _literal_values(part)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if head == "dict":
        return "a mapping, which is typed name by name with a dot, +setting.name=value"
    if head in ("list", "Sequence") and isinstance(part, ast.Subscript):
        items = {"int": "whole numbers", "float": "numbers", "str": "texts"}.get(_head(part.slice), "values")
        return f"a list of {items} in brackets"
    return ast.unparse(part)
