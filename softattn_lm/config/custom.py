"""A user's own code: `my_kernel.py:Mine` or `package.module:Mine`, with the current folder importable."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from softattn_lm.config.nearest import meant
from softattn_lm.config.tree import PACKAGE
from softattn_lm.config.trust import require_trusted
from softattn_lm.errors import UserError

# What a model hands to a constructor that asks for it by name.
SHAPES = ("n_head", "n_kv_head", "head_dim", "d_model", "context", "layer", "bias")
# Every ordinary way in which code on tensors, or its import, goes wrong.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def custom(target: str, options: dict[str, Any] | None = None) -> Any:
    """The policy that `target` names, with the user's own `options` and nothing of ours.

    Its constructor is handed the shapes that it asks for by name, as any policy's. Raises UserError for a target that
    nobody trusted, that is not there or is no kernel, and for an option that it does not take.
    """
    require_trusted(target)
    typed = f"attention.target={target}"
    kind = load(target, typed)
    # Torch comes along, so it is imported only where something is built.
    from softattn_lm.attention.kernel import AttentionKernel

    if not (isinstance(kind, type) and issubclass(kind, AttentionKernel)):
        raise UserError(
            f"{typed} is no AttentionKernel; derive a class from softattn_lm.attention."
            "AttentionKernel, or try a plain function with softattn check_attention --like sdpa"
        )
    given = dict(options or {})
    with blamed(typed, target):
        signature = inspect.signature(kind)
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in given:
            if name not in parameters:
                hint = meant(name, parameters) or f"; it takes {', '.join(parameters) or 'nothing'}"
                raise UserError(f"attention.options.{name} is no argument of {target}{hint}")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and name not in given and name not in SHAPES:
            raise UserError(
                f"{typed}: {_line_of(kind)}the constructor needs {name}, which is no shape of a model; there are "
                f"{', '.join(SHAPES)}; give {name} a default, or type +attention.options.{name}=..."
            )

    def made(**arguments: Any) -> Any:
        with blamed(typed, target):
            return kind(**arguments)

    made.__signature__ = signature  # type: ignore[attr-defined]  # who makes it asks which shapes it takes
    return partial(made, **given)


@contextmanager
def blamed(typed: str, target: str) -> Iterator[None]:
    """Turns what a person's own code raises into a UserError of one line: what was typed, the file, the line number
    and what Python said.
    """
    try:
        yield
    except UserError:
        raise
    except FAILURES as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        said = error.msg if isinstance(error, SyntaxError) else said
        raise UserError(f"{typed}: {_line_in(error, target)}{type(error).__name__}: {said}") from error


def _line_in(error: BaseException, target: str) -> str:
    """`my_kernel.py, line 3: `, the deepest line in a file of the person's; of any library's if it is in none."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return _line(error.filename, error.lineno)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    frames = [frame for frame in frames if Path(frame.filename) != Path(__file__)]
    folders = _folders(target.rpartition(":")[0])
    own = [frame for frame in frames if _is_own(Path(frame.filename), folders)]
    deepest = (own or frames)[-1:]
    return _line(deepest[0].filename, deepest[0].lineno) if deepest else ""


def _is_own(file: Path, folders: Sequence[str]) -> bool:
    below = any(file.is_relative_to(folder) for folder in folders)
    return below and "site-packages" not in file.parts and not file.is_relative_to(PACKAGE)


def _line_of(kind: type) -> str:
    code = getattr(kind.__init__, "__code__", None)  # type: ignore[misc]
    return "" if code is None else _line(code.co_filename, code.co_firstlineno)


def _line(filename: str, number: int | None) -> str:
    file = Path(filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}, line {number}: "


def _folders(place: str) -> list[str]:
    """Where a person's own code lies: the current folder and that of the file."""
    return [os.getcwd(), str(Path(place).expanduser().resolve().parent)]


def load(target: str, typed: str) -> Any:
    """The object that `target` names. Runs the code of its module: only for what a person typed or trusted.

    typed: what the person typed, for errors. Raises UserError if there is no such file, module or name, and for what
    the code itself raises.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UserError(f"{typed}: write file.py:Name or package.module:Name")
    # At the end: a file of the user's must not take the place of a library's.
    for folder in _folders(place):
        if folder not in sys.path:
            sys.path.append(folder)
    with blamed(typed, target):
        module = _from_file(place, typed) if place.endswith(".py") else _from_package(place, typed)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(f"{typed}: {place} has no {name}{meant(name, public) or ''}")
    return getattr(module, name)


def require_there(target: str, typed: str) -> None:
    """Raises UserError for a file, module or name that is not there, as far as its text tells: nothing of it runs, and
    torch is not imported.
    """
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        top = place.partition(".")[0]
        if not (Path(f"{top}.py").is_file() or Path(top).is_dir()) and importlib.util.find_spec(top) is None:
            raise _no_module(place, typed)
        return
    file = _file(place, typed)
    with blamed(typed, target):
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    known = {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    known |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {(node.asname or node.name).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if not known & {name, "*"}:
        raise UserError(f"{typed}: {place} has no {name}{meant(name, known) or ''}")


def _file(place: str, typed: str) -> Path:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{typed}: there is no file {file}; run this in the folder where it is")
    return file


def _no_module(place: str, typed: str) -> UserError:
    return UserError(f"{typed}: there is no module {place}; a file is written my_kernel.py:Name")


def _from_file(place: str, typed: str) -> Any:
    file = _file(place, typed)
    name = f"custom_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except FAILURES:
        del sys.modules[name]
        raise
    return module


def _from_package(place: str, typed: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not
        raise _no_module(place, typed) from None
