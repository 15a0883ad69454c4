"""Weights & Biases beside metrics.jsonl, when asked for. Nothing here asks a question or needs the network."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger

from softattn_lm.config.settings import LoggerSettings
from softattn_lm.errors import UserError
from softattn_lm.runs import is_first_process


def make_loggers(settings: LoggerSettings, folder: Path, config: dict[str, Any]) -> list[Logger]:
    """Lightning's loggers of a run: none but wandb's, as csv and none are served by metrics.jsonl."""
    if settings.name != "wandb":
        return []
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError(
            "logger=wandb needs the package wandb; install it with: pip install wandb, or type logger=csv"
        ) from None
    from lightning.pytorch.loggers import WandbLogger

    if not is_first_process():
        return [WandbLogger(save_dir=folder)]  # never started: only the first rank logs
    # One tracker run for one run folder, also when it is continued.
    remembered = folder / "wandb" / "id"
    known = remembered.read_text(encoding="utf-8").strip() if remembered.is_file() else None
    remembered.parent.mkdir(exist_ok=True)
    run = wandb.init(
        name=folder.name,
        dir=folder,
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=settings.tags,
        id=known,
        resume="allow",
        config=config,
        mode="online" if is_logged_in() else "offline",
        settings=wandb.Settings(console="off", silent=True),
    )
    remembered.write_text(run.id, encoding="utf-8")
    return [WandbLogger(save_dir=folder, experiment=run)]


def is_logged_in() -> bool:
    """Whether wandb has a key, in the environment or in ~/.netrc, and is not told by WANDB_MODE to stay offline."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return False
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def finish_loggers(loggers: list[Logger]) -> None:
    """wandb keeps one run per process until it is told to finish; the next in this process would share it."""
    if loggers:
        import wandb

        wandb.finish()
