"""Hydra's composition, and Hydra's faults turned into one line. Hydra is imported when first needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from softattn_lm.config.faults import explain, missing_value, one_line, require_readable
from softattn_lm.config.patterns import expand_patterns
from softattn_lm.config.raw import decode_tree
from softattn_lm.config.rules import BUDGETS
from softattn_lm.errors import UserError

# Without it Hydra prints its errors itself and exits; it is read when Hydra is imported.
os.environ["HYDRA_FULL_ERROR"] = "1"


def compose(command: str, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """The plain resolved config of a command, before any check. Raises UserError for what Hydra refuses."""
    require_readable(command, overrides, folder)
    with hydra_faults(command, overrides, folder):
        return plain(_compose(command, overrides, folder), overrides, folder)


def plain(composed: Any, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """A DictConfig as dict, list, str, int, float, bool and None; interpolations resolved, raw text as it was typed."""
    from omegaconf import OmegaConf

    expand_patterns(composed, folder)
    cfg = decode_tree(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    return _one_budget(cfg, overrides)


def _one_budget(cfg: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A budget given on the command line replaces the yaml's, also one of another kind."""
    given = {word.lstrip("+").partition("=")[0] for word in overrides if not word.endswith("=null")}
    typed = [key for key in BUDGETS if key in given]
    if typed and "steps" in cfg:
        return {key: None if key in BUDGETS and key not in typed else value for key, value in cfg.items()}
    return cfg


def choices_and_config(command: str, overrides: Sequence[str], folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """What was chosen from each group, and the plain config with `???` where a value is still missing."""
    from omegaconf import OmegaConf

    require_readable(command, overrides, folder)
    with hydra_faults(command, overrides, folder):
        composed = _compose(command, overrides, folder, return_hydra_config=True)
        chosen = dict(composed.hydra.runtime.choices)
        cfg = {key: value for key, value in composed.items_ex(resolve=False) if key != "hydra"}
        return chosen, decode_tree(OmegaConf.to_container(OmegaConf.create(cfg), resolve=True))


def _compose(command: str, overrides: Sequence[str], folder: Path, **options: bool) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(folder), version_base="1.3"):
        return hydra_compose(command, list(overrides), **options)


@contextmanager
def hydra_faults(command: str, overrides: Sequence[str], folder: Path) -> Iterator[None]:
    """Turns what Hydra and OmegaConf raise about a config into one UserError."""
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except MissingMandatoryValue as error:
        raise missing_value(error, overrides) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, command, overrides, folder) from error
    except YAMLError as error:
        raise UserError(f"a config file is no valid yaml: {one_line(str(error))}") from error
