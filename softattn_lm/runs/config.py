"""config.yaml of a run: its resolved settings, plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from softattn_lm.errors import UserError
from softattn_lm.runs.files import replace_text


def read_config(folder: Path) -> dict[str, Any]:
    """The saved, resolved settings. Raises UserError when the file is missing or is not a mapping."""
    path = folder / "config.yaml"
    try:
        with path.open(encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except FileNotFoundError:
        raise UserError(f"{folder} is no run folder: it has no config.yaml") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} cannot be read as yaml: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} should hold a mapping of settings, and holds {type(config).__name__}")
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    replace_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
