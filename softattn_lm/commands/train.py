"""train: make or find the run folder, then train in it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from softattn_lm.commands.companion import FIRST, first_spoke, following_first
from softattn_lm.config.check import check
from softattn_lm.config.stored import stored_run
from softattn_lm.errors import UserError
from softattn_lm.runs.changes import forked_config, resumed_config
from softattn_lm.runs.config import read_config
from softattn_lm.runs.files import write_failed
from softattn_lm.runs.find import find_run
from softattn_lm.runs.names import runs_folder
from softattn_lm.runs.new import discard_unbegun, new_run
from softattn_lm.runs.processes import is_first_process, started_from_outside
from softattn_lm.training import slurm

# Processes that Lightning starts for the other devices of this machine run the same command; this tells them the
# folder.
FOLDER = "SOFTATTN_RUN_FOLDER"
WAIT = 120.0  # seconds for the first of several processes to make it


def run(cfg: dict[str, Any], words: list[str], overrides: list[str]) -> None:
    """`overrides`: what the person typed, to tell it from defaults when a run is continued."""
    if cfg["describe"]:
        from softattn_lm.training.prepared import described

        print(json.dumps(described(cfg), indent=1))
        return
    companion = "LOCAL_RANK" in os.environ and FOLDER in os.environ
    try:
        folder, cfg, resume = _folder(cfg, overrides)
    except OSError as error:
        raise write_failed(error, runs_folder(cfg["runs"])) from None
    # Torch and Lightning are imported only now that the names are known to be right.
    from softattn_lm.training.run import train

    try:
        with following_first(companion):
            summary = train(cfg, folder, resume)
    except UserError:
        if companion and first_spoke():
            sys.exit(2)
        if not resume and is_first_process():
            discard_unbegun(folder)
        raise
    finally:
        os.environ.pop(FOLDER, None)  # the next run of this process has a folder of its own
    if summary["state"] == "interrupted":
        sys.exit(0 if companion else summary["exit_status"])


def _folder(cfg: dict[str, Any], overrides: list[str]) -> tuple[Path, dict[str, Any], bool]:
    """The run folder, the config the run goes by, and whether it continues."""
    if "LOCAL_RANK" in os.environ and FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
        return folder, saved_config(folder), True  # from its checkpoint if there is one, as the first process does
    resumes = cfg["resume"] is not None
    if not resumes and started_from_outside() and cfg["name"] is None:
        raise UserError(
            "several processes of this command were started from outside (torchrun, srun), and each would give the run "
            "a name of its own; type one for all of them, such as name=my-run"
        )
    if resumes and cfg["fork"] is not None:
        raise UserError("resume= goes on with a run and fork= starts another from it; give one of them")
    begun = None if resumes else _taken_up(cfg, overrides)
    if begun is not None:
        folder, resumes = begun, True
        cfg = saved_config(folder)
    elif not resumes and not is_first_process():
        folder = _wait_for(runs_folder(cfg["runs"]) / cfg["name"])
        cfg = saved_config(folder)
    elif not resumes:
        cfg = cfg if cfg["fork"] is None else _forked(cfg, overrides)
        folder = new_run(cfg["runs"], cfg["name"], cfg)
    else:
        folder = find_run(cfg["resume"], cfg["runs"])
        cfg = resumed_config(saved_config(folder), {"runs": cfg["runs"], **typed(cfg, overrides)})
    if is_first_process() and begun is None and cfg["resume"] is None:
        slurm.remember(folder, overrides)
    os.environ |= {FOLDER: str(folder.resolve()), FIRST: str(os.getpid())}
    return folder, cfg, resumes


def _taken_up(cfg: dict[str, Any], overrides: list[str]) -> Path | None:
    """The run that this job began in an earlier life, marked so that no other process of the job takes it too."""
    root = runs_folder(cfg["runs"])
    with slurm.one_at_a_time(root):
        begun = slurm.run_to_continue(root, cfg["name"], overrides)
        if begun is not None and is_first_process():
            slurm.remember(begun, overrides)
    return begun


def _forked(cfg: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    from softattn_lm.training.fork import split

    parent = find_run(split(cfg["fork"])[0], cfg["runs"])
    return check(forked_config(saved_config(parent), typed(cfg, overrides), cfg), "TrainSettings")


def saved_config(folder: Path) -> dict[str, Any]:
    """The settings of a run that is there, perhaps a stranger's: checked as if they had been typed."""
    return stored_run(read_config(folder), str(folder / "config.yaml"))


def _wait_for(folder: Path) -> Path:
    """The run folder that the first process makes. Raises UserError if it does not come, as on another file system."""
    deadline = time.monotonic() + WAIT
    while not (folder / "config.yaml").is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f"the first process made no run folder {folder} within {WAIT:.0f} s; runs= must be a folder that "
                "all "
                "nodes share"
            )
        time.sleep(0.1)
    return folder


def typed(cfg: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Dotted key -> the value that came of it in the composed config; a choice that leaves no key is its own text."""
    changes: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.lstrip("+~").partition("=")
        node: Any = cfg
        for part in key.split("."):
            node = node.get(part, text) if isinstance(node, dict) else text
        changes[key] = node
    return changes
