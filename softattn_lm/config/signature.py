"""Constructor signatures read from source files, without importing them: the schema of every config node.

A parameter's annotation is one of int, float, bool, str, None, Literal[...], list[...], their unions and names that
the same file gives to such a union; anything else (another object, a callable) is not checked here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from softattn_lm.config.tree import PACKAGE


@dataclass(frozen=True)
class Parameter:
    annotation: ast.expr | None  # None: anything
    required: bool


@dataclass(frozen=True)
class Signature:
    parameters: dict[str, Parameter]
    open: bool  # takes **kwargs


def source_file(module: str) -> Path | None:
    """The file of a module of this package; None for modules of others, whose nodes nobody may name yet."""
    first, *parts = module.split(".")
    if first != PACKAGE.name:
        return None
    path = PACKAGE.joinpath(*parts)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def signature(target: str) -> Signature | None:
    """Signature of "package.module.Name" (class or function); None if there is no such thing in the package."""
    module, _, name = target.rpartition(".")
    file = source_file(module)
    if file is None:
        return None
    tree = _parse(file)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _of_function(node, _aliases(tree), skip_self=False)
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, tree)
    return None


def signature_in_file(target: str) -> Signature | None:
    """Signature of a class in a person's own file, "my_kernel.py:Mine"; None where its text does not tell."""
    place, _, name = target.rpartition(":")
    file = Path(place).expanduser()
    if not place.endswith(".py") or not file.is_file():
        return None
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        return _of_class(found[-1], tree) if found else None
    except (SyntaxError, ValueError):
        return None  # Python says what is wrong once it is loaded


def _of_class(node: ast.ClassDef, tree: ast.Module) -> Signature:
    aliases = _aliases(tree)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _of_function(item, aliases, skip_self=True)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = {
            item.target.id: Parameter(_resolve(item.annotation, aliases), item.value is None)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        return Signature(fields, open=False)
    for base in node.bases:
        inherited = _of_base(base, tree)
        if inherited is not None:
            return inherited
    return Signature({}, open=False)


def _of_base(base: ast.expr, tree: ast.Module) -> Signature | None:
    """A base class in the same file, or one that this file imports from the package."""
    if not isinstance(base, ast.Name):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == base.id:
            return _of_class(node, tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                if (alias.asname or alias.name) == base.id:
                    return signature(f"{node.module}.{alias.name}")
    return None


def _of_function(node: ast.FunctionDef, aliases: dict[str, ast.expr], skip_self: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    n_required = len(positional) - len(arguments.defaults)
    found = {
        arg.arg: Parameter(_resolve(arg.annotation, aliases), index < n_required)
        for index, arg in enumerate(positional)
        if not (skip_self and index == 0)
    }
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[arg.arg] = Parameter(_resolve(arg.annotation, aliases), default is None)
    return Signature(found, open=arguments.kwarg is not None)


def _aliases(tree: ast.Module) -> dict[str, ast.expr]:
    """Names of types made in this file, `Norm = Literal["layer", "rms"]`, or imported from another of the package."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            file = source_file(node.module)
            made_there = _made_here(_parse(file)) if file is not None else {}
            for alias in node.names:
                if alias.name in made_there:
                    found[alias.asname or alias.name] = made_there[alias.name]
    return found | _made_here(tree)


def _made_here(tree: ast.Module) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def _resolve(annotation: ast.expr | None, aliases: dict[str, ast.expr]) -> ast.expr | None:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Name):
        return aliases.get(annotation.id, annotation)
    if isinstance(annotation, ast.BinOp):
        left, right = _resolve(annotation.left, aliases), _resolve(annotation.right, aliases)
        assert left is not None and right is not None
        return ast.BinOp(left, annotation.op, right)
    return annotation
