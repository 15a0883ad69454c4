"""Run folders: how they are named, found, described and continued. Standard library and yaml only, so that a wrong name
is answered before torch is imported.

    runs/20260131-142530-3fa9c1/          or runs/<name>
        config.yaml      the resolved settings, plain
        versions.json    python, packages, commit
        status.json      {"state": "running" | "finished" | "failed" | "interrupted", "step", "steps", "error"}
        metrics.jsonl    one row per optimizer step and per validation, and per attention head at validations
        samples.txt  summary.json  checkpoints/{last,best,step-00001000}.ckpt
"""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from softattn_lm import __version__
from softattn_lm.errors import UserError, writing

State = Literal["running", "finished", "failed", "interrupted"]

# What a continued run may change: how long it goes on, where it runs and what is written down; nothing that was learned
# with.
RESUMABLE = (
    "steps",
    "tokens",
    "epochs",
    "logger",
    "trainer",
    "training.val_every",
    "training.log_every",
    "training.throughput",
    "training.checkpoint_activations",
    "training.sample_every",
    "training.save_every",
    "training.keep_steps",
    "training.num_workers",
    "training.nonfinite",
    "training.max_skipped",
    "training.telemetry",
    "training.score",
)
LONGEST_NAME = 200  # bytes of a run's name; file systems allow 255, and files beside it are called after it
# The temporary names of `replace_text` and of checkpoints.
_LEFT_OVER = re.compile(r".+\.(json|jsonl|yaml|csv|txt|ckpt|npz)\.\d+\.tmp", re.DOTALL)
_BUDGETS = ("steps", "tokens", "epochs")
_MODEL = ("model", "attention", "scale", "position", "mask", "projections", "tokenizer", "experiment")


def is_first_process() -> bool:
    """Whether this is the process that writes: the only one, or the first of those that train together."""
    for rank in ("RANK", "SLURM_PROCID"):  # torchrun's and SLURM's, over all nodes
        if rank in os.environ:
            return os.environ[rank] == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def started_from_outside() -> bool:
    """Whether a launcher (torchrun, srun) started several processes of this command, and not Lightning the others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or int(os.environ.get("SLURM_NTASKS", "1")) > 1


def new_run(root: str | Path, name: str | None, config: dict[str, Any]) -> Path:
    """Make a run folder of its own below `root`, holding config.yaml and versions.json, and return it.

    Without a name the folder is called after the time and six random hex digits. The folder is made exclusively: of two
    runs that ask for the same name at the same moment one gets it. Raises UserError for a name that is taken or no
    name. Only a job that a sweep has written down has a name of two parts, <sweep>/<job>.
    """
    root = runs_folder(root)
    root.mkdir(parents=True, exist_ok=True)
    if name is not None:
        parts = name.split("/", 1) if _is_job(root / name) else [name]
        folder = root.joinpath(*map(valid_name, parts))
    else:
        folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    # Made aside and moved into its place: a process that is killed here leaves no half of a run under the name.
    waiting = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    waiting.mkdir()
    try:
        write_config(waiting, config)
        write_json(waiting / "versions.json", versions())
        os.rename(waiting, folder)  # which fails where there is a folder with something in it
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise UserError(
            f"name={name} is taken: {folder} exists; continue it with resume={name}, or type another name"
        ) from None
    finally:  # a signal too
        shutil.rmtree(waiting, ignore_errors=True)
    return folder


@contextmanager
def in_hand(folder: Path) -> Iterator[None]:
    """While this process trains in `folder`, no other can. Raises UserError if one does already.

    The lock goes with the process, however it ends, and not on to loader processes, which may outlive it for seconds.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            raise UserError(
                f"run {run_name(folder)} is being trained by another process; wait for it, or stop it first"
            ) from None
        # Otherwise a file system that knows no locks.
    try:
        yield
    finally:
        os.close(file)


def is_in_hand(folder: Path) -> bool:
    """Whether another process trains in `folder` now, as far as this file system tells."""
    if os.name != "posix" or not (folder / "lock").is_file():
        return False
    import fcntl

    with (folder / "lock").open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def remove_left_over(folder: Path) -> None:
    """Files that a process killed in the middle of a write left in a run folder, under names that nothing reads."""
    for place in (folder, folder / "checkpoints"):
        for waiting in place.glob("*.tmp"):
            if _LEFT_OVER.fullmatch(waiting.name) and waiting.is_file():  # and not a person's
                waiting.unlink(missing_ok=True)


def runs_folder(text: str | Path) -> Path:
    """The folder that runs=`text` means. One that is called so wins over ~ as a home, which a ~name without one is
    not."""
    return Path(text if os.path.exists(text) else os.path.expanduser(text))


def run_name(folder: Path, root: str | Path = "runs") -> str:
    """What a person types for this run where runs=`root`: its path below `root`, <sweep>/<job> for the job of a sweep;
    outside of it the whole path."""
    below, above = folder.resolve(), runs_folder(root).resolve()
    return below.relative_to(above).as_posix() if below.is_relative_to(above) else str(folder)


def discard_unbegun(folder: Path) -> None:
    """Remove the folder of a new run that was refused before its first step: it holds nothing, and its name is free.

    The folder of a sweep's job stays, and says why that job failed.
    """
    files = list(folder.iterdir())
    if not _is_job(folder) and all(_says_nothing(file) for file in files):
        for file in files:
            file.unlink()
        folder.rmdir()


def _says_nothing(file: Path) -> bool:
    if file.name in ("metrics.jsonl", "metrics.csv"):
        return not file.read_text(encoding="utf-8").strip()
    return file.name in ("config.yaml", "versions.json", "status.json", "slurm.json", "lock")


def _is_job(folder: Path) -> bool:
    return (folder.parent / "jobs" / f"{folder.name}.yaml").is_file()


def valid_name(name: str) -> str:
    """A folder name that needs no quoting anywhere. `=` would read as an override on the command line."""
    bad = sorted({c for c in name if not (c.isalnum() or c in "._-")})
    if not bad and len(name.encode()) > LONGEST_NAME:
        raise UserError(f"name={name[:40]}... is {len(name.encode())} bytes long; type one of {LONGEST_NAME} or less")
    if not name or bad or name.startswith((".", "-")) or name == "cache":
        said = f"contains {' '.join(repr(c) for c in bad)}" if bad else "is empty, reserved or begins with . or -"
        raise UserError(
            f"name={name} {said}; use letters, digits, dots, dashes and underscores, such as name=sdpa-seed0"
        )
    return name


def find_run(text: str | None, root: str | Path) -> Path:
    """The run a person means: a path, a name below `root`, or the beginning of exactly one name. None is the newest
    run that has a checkpoint.

    Raises UserError with the nearest name when there is no such run, or with the candidates when there are several.
    Names in it are paths below `root`, as the jobs of two sweeps may be called alike.
    """
    root = runs_folder(root)
    folders = run_folders(root)
    trained = [folder for folder in folders if (folder / "checkpoints" / "last.ckpt").is_file()]
    newest = max(trained or folders, key=lambda folder: (_written(folder), folder.name), default=None)
    if text is None:
        if newest is None:
            raise UserError(f"there is no run below {root} yet; train one with: python scripts/train.py")
        if not trained:
            raise UserError(
                f"no run below {root} has saved a checkpoint yet; the newest is {run_name(newest, root)}, "
                "and resume= continues it"
            )
        return newest
    given = Path(os.path.expanduser(text))
    for folder in (Path(text), given, root / text):
        if (folder / "config.yaml").is_file():
            return folder
    for folder in (Path(text), given, root / text) if text else ():
        if folder.is_dir() and not any(folder.iterdir()):
            raise UserError(f"{folder} is an empty folder and no run: it has no config.yaml")
    if given.suffix == ".ckpt" and given.is_file():
        raise UserError(f"{text} is a checkpoint; type the run's folder: {given.parent.parent}")
    names = {folder: run_name(folder, root) for folder in folders}
    beginning = [folder for folder in folders if text and (folder.name.startswith(text))]
    beginning = beginning or [folder for folder in folders if text and names[folder].startswith(text)]
    if len(beginning) == 1:
        return beginning[0]
    if beginning:
        some = ", ".join(names[folder] for folder in beginning[:6])
        raise UserError(f"run {text!r} could be any of {len(beginning)}: {some}; type more of the name")
    spelt = {folder.name: name for folder, name in names.items()} | {name: name for name in names.values()}
    near = difflib.get_close_matches(text, spelt, n=1, cutoff=0.4)
    if near:
        hint = f"did you mean {spelt[near[0]]}?"
    else:
        hint = f"the newest is {names[newest]}" if newest is not None else "there are none yet: python scripts/train.py"
    raise UserError(f"no run {text!r} below {root}; {hint}")


def run_folders(root: Path) -> list[Path]:
    """All below `root` that hold a config, jobs of sweeps included; none that is only being made."""
    return sorted(
        folder
        for above in _folders(root)
        for folder in (above, *_folders(above))
        if os.path.isfile(folder / "config.yaml")
    )


def _folders(place: Path) -> list[Path]:
    """In `place`, but for those that are only being made; none where it vanished in the meantime or may not be read."""
    try:
        with os.scandir(place) as entries:
            return [place / entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []


def _written(run: Path) -> int:
    """When its config was, ns; 0 for a run that vanished in the meantime."""
    try:
        return (run / "config.yaml").stat().st_mtime_ns
    except OSError:
        return 0


def made_folder(folder: Path) -> Path:
    """For what a command is going to write. Raises UserError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror or error}; type another runs=") from None
    return folder


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


def resumed_config(saved: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings a continued run goes on with: the saved ones, and `changes` (dotted key -> value) where they are
    allowed.

    A change to the value that is already there is no change. A new budget replaces the old one, in whatever unit.
    Raises UserError naming the first setting that may not change.
    """
    config = json.loads(json.dumps(saved))
    for key, value in changes.items():
        if key in ("resume", "describe", "trust"):
            continue
        if key == "runs":  # where the token files lie and other runs are; the run itself may have been moved
            config["runs"] = value
            continue
        if any(key == allowed or key.startswith(f"{allowed}.") for allowed in RESUMABLE):
            continue
        if _get(saved, key) != value:
            had = "" if isinstance(value, dict) else f" (the run has {_get(saved, key)}, you typed {value})"
            raise UserError(
                f"{key} cannot change when a run is continued{had}; allowed are {', '.join(RESUMABLE)}; "
                "start a new run instead"
            )
    if any(changes.get(key) is not None for key in _BUDGETS):
        for key in _BUDGETS:
            config[key] = changes.get(key)
    for key, value in changes.items():
        allowed = any(key == a or key.startswith(f"{a}.") for a in RESUMABLE)
        if allowed and key not in _BUDGETS:
            _put(config, key, value)
    return config


def forked_config(saved: dict[str, Any], changes: dict[str, Any], composed: dict[str, Any]) -> dict[str, Any]:
    """The settings of a new run that starts from another's checkpoint: the parent's, and `changes` as they are typed.

    What the weights stand for stays: model (its dropout apart), policies and tokenizer. `composed`: where a choice
    sets more than its own key, as optimizer=adamw sets lr. Raises UserError naming the first setting that may not
    change.
    """
    config = json.loads(json.dumps(saved))
    for key, value in changes.items():
        if key.split(".")[0] in _MODEL and key != "model.dropout":
            if _get(saved, key) != value:
                raise UserError(
                    f"{key} cannot change in a fork, which keeps the model and the tokenizer of its parent; "
                    "start a new run instead"
                )
        elif key not in ("resume", "describe", "trust", *_BUDGETS):
            _put(config, key, value)
    if "optimizer" in changes:
        config["lr"] = composed["lr"]
    if "optimizer.lr" not in changes:
        config["optimizer"]["lr"] = config["lr"]
    if "model.dropout" in changes:
        for key in ("model", "attention"):
            _replace_dropout(config[key], changes["model.dropout"])
    if any(changes.get(key) is not None for key in _BUDGETS):
        config |= {key: changes.get(key) for key in _BUDGETS}
    return config | {key: composed[key] for key in ("name", "runs", "fork")} | {"resume": None}


def _replace_dropout(node: Any, value: float) -> None:
    for key, item in node.items() if isinstance(node, dict) else ():
        if key == "dropout":
            node[key] = value
        for inner in item if isinstance(item, list) else [item]:
            _replace_dropout(inner, value)


def _get(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value


def write_status(
    folder: Path, state: State, *, step: int, steps: int, error: str | None = None, parent: str | None = None
) -> None:
    """`step` of `steps` optimizer steps are done; `error` is one line; `parent`: the run@step it was forked from."""
    status = {"state": state, "step": step, "steps": steps, "error": error}
    write_json(folder / "status.json", status | ({} if parent is None else {"parent": parent}))


def read_status(folder: Path) -> dict[str, Any]:
    """{} when the run never came to write one."""
    path = folder / "status.json"
    if not path.is_file():
        return {}
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object; remove it")
    return status


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A last line without its line break, left by a killed process, is dropped.

    Raises UserError naming the line that is no row.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or "kind" not in row:
            raise UserError(f"{path} is damaged: line {number} is no row of a run; remove that line")
        rows.append(row)
    return rows


def cut_metrics(folder: Path, step: int) -> None:
    """Drop the rows past `step`: what a run did after the checkpoint it is continued from, it is going to do again."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    replace_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write_failed(error: OSError, folder: Path) -> UserError:
    """The line for a file that could not be written in a run folder or beside it: a full disk, no permission."""
    where = folder if error.filename is None else error.filename
    what = error.strerror or type(error).__name__
    saved = (folder / "checkpoints" / "last.ckpt").is_file()
    hint = f"; its last checkpoint is whole: make room and type resume={run_name(folder)}" if saved else ""
    return UserError(f"{where} could not be written: {what}{hint}")


def versions() -> dict[str, Any]:
    """What this run was computed with; a package that is not installed is left out."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "softattn_lm": __version__,
    }
    for package in ("torch", "lightning", "hydra-core", "numpy", "datasets", "tokenizers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git_commit()
    if commit is not None:
        found["commit"] = commit
    return found


def _git_commit() -> str | None:
    """The commit of the checkout this package lies in, with "+changes" when files differ from it; None outside one."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        said = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def write_json(path: Path, value: Any) -> None:
    """A number that is not finite becomes null: JSON knows no other."""
    replace_text(path, json.dumps(finite_or_null(value), indent=1, allow_nan=False) + "\n")


def finite_or_null(value: Any) -> Any:
    """`value` with null for each number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, sees the old one or the new one and never half of it."""
    waiting = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    waiting.unlink(missing_ok=True)
    try:
        with writing(path), waiting.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)
