"""A user's own code: `my_kernel.py:Mine` or `package.module:Mine`, with the current folder importable."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from softattn_lm.config.nearest import meant
from softattn_lm.config.trust import require_trusted
from softattn_lm.errors import UserError


def custom(target: str, options: dict[str, Any] | None = None) -> Any:
    """The policy that `target` names, with the user's own `options` and nothing of ours.

    Its constructor is handed the shapes that it asks for by name, as any policy's. Raises UserError for a target that
    nobody trusted, that is not there or is no kernel, and for an option that it does not take.
    """
    require_trusted(target)
    kind = load(target, "attention.target")
    # Torch comes along, so it is imported only where something is built.
    from softattn_lm.attention.kernel import AttentionKernel

    if not (isinstance(kind, type) and issubclass(kind, AttentionKernel)):
        raise UserError(
            f"attention.target={target} is no AttentionKernel; derive a class from softattn_lm.attention."
            "AttentionKernel, or try a plain function with softattn check_attention --like sdpa"
        )
    given = dict(options or {})
    parameters = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in given:
            if name not in parameters:
                hint = meant(name, parameters) or f"; it takes {', '.join(parameters) or 'nothing'}"
                raise UserError(f"attention.options.{name} is no argument of {target}{hint}")
    return partial(kind, **given)


def load(target: str, setting: str) -> Any:
    """The object that `target` names. Runs the code of its module: only for what a person typed or trusted.

    Raises UserError if there is no such file, module or name; what the code itself raises stays as it is.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UserError(f"{setting}={target}: write file.py:Name or package.module:Name")
    # At the end: a file of the user's must not take the place of a library's.
    for folder in (os.getcwd(), str(Path(place).expanduser().resolve().parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    module = _from_file(place, setting) if place.endswith(".py") else _from_package(place, setting)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(f"{setting}={target}: {place} has no {name}{meant(name, public) or ''}")
    return getattr(module, name)


def _from_file(place: str, setting: str) -> Any:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{setting}={place}: there is no file {file}; run this in the folder where it is")
    name = f"custom_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _from_package(place: str, setting: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not
        raise UserError(f"{setting}={place}: there is no module {place}; a file is written my_kernel.py:Name") from None
