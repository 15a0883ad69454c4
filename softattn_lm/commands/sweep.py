"""`train -m`: Hydra's own multirun, each of whose jobs starts a fresh `train` process from a saved, resolved config.

So a job may itself start processes (trainer=ddp), has its own tracker run, and cannot take the sweep down with it.
    runs/<sweep>/sweep.json           what was asked
    runs/<sweep>/jobs/<job>.yaml      the resolved config of each job
    runs/<sweep>/<job>/               its run folder
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from softattn_lm.commands import COMMANDS
from softattn_lm.config.argv import Command
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose, hydra_faults, plain
from softattn_lm.config.faults import require_readable
from softattn_lm.config.raw import decode, encode
from softattn_lm.config.stored import require_harmless
from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError, visible, writing
from softattn_lm.runs.config import write_config
from softattn_lm.runs.files import write_json
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.names import run_name, runs_folder, valid_name
from softattn_lm.runs.status import State, read_status, write_status
from softattn_lm.training.console import plain_console

STOPPED_BY_HAND = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)}


class Stopped(KeyboardInterrupt):
    """SIGTERM, SIGHUP or SIGUSR1 came, which stop a sweep as Ctrl-C does."""


def sweep(command: Command, overrides: list[str]) -> None:
    """Runs every combination and prints a table. Raises SystemExit(1) if a job failed, UserError before any starts.

    A signal stops the job at hand, which saves, and no other is started: KeyboardInterrupt, or SystemExit(143).
    """
    typed = [word for word in overrides if not word.endswith("=null")]
    given = {word.partition("=")[0].lstrip("+"): decode(word.partition("=")[2]) for word in typed}
    if "resume" in given:
        raise UserError(f"resume={given['resume']}: one run is resumed at a time; leave out -m")
    _require_possible(command, overrides)
    folder = _new_folder(runs_folder(given.get("runs", "runs")), given.get("name"))
    task = [word for word in overrides if word.partition("=")[0] not in ("name", "runs")]
    fixed = [word.partition("=")[0].lstrip("+") for word in task if not _is_swept(word)]
    record = {"overrides": [decode(word) for word in task], "fixed": fixed}
    write_json(folder / "sweep.json", record)
    try:
        with _termination_interrupts():
            _multirun(folder, [*task, f"name={encode(folder.name)}", f"runs={encode(str(folder.parent))}"])
    except Stopped:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        n_failed = _print_table(folder)
    if n_failed:
        raise SystemExit(1)


def job(composed: Any) -> None:
    """One job of Hydra's multirun. It never raises for a failure of its own: the other jobs go on."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    overrides = list(hydra.overrides.task)
    cfg = plain(composed, overrides, config_folder())
    folder = Path(cfg["runs"]) / cfg["name"]
    fixed = [*json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["fixed"], "name", "runs"]
    swept = [decode(word) for word in overrides if word.partition("=")[0].lstrip("+") not in fixed]
    label = f"{hydra.job.num:02d}-{slug(swept)}".rstrip("-")
    if cfg["logger"].get("group") is None:
        cfg["logger"]["group"] = folder.name
    cfg["name"] = f"{folder.name}/{label}"
    file = folder / "jobs" / f"{label}.yaml"
    file.parent.mkdir(exist_ok=True)
    saved = {"swept": swept, "config": cfg}
    with writing(file):
        file.write_text(yaml.safe_dump(saved, sort_keys=False, allow_unicode=True), encoding="utf-8")
    print(visible(f"\njob {hydra.job.num}: {' '.join(swept)}  ->  {folder / label}"), flush=True)
    try:
        check(cfg, COMMANDS["train"].settings)
    except UserError as error:
        print(visible(f"error: {error}"), file=sys.stderr, flush=True)
        _mark(folder / label, cfg, "failed", str(error))
        return
    try:
        status = _run_child([sys.executable, "-m", "softattn_lm", "train", "--job", str(file)])
    except KeyboardInterrupt:
        _mark(folder / label, cfg, "interrupted", "the sweep was stopped")
        raise
    if status in STOPPED_BY_HAND:
        _mark(folder / label, cfg, "interrupted", "the job was stopped")
    elif status:
        _mark(folder / label, cfg, "failed", f"exit status {status}")


def read_job(file: str) -> dict[str, Any]:
    """The config that `job` saved, for the process it starts."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no job of a sweep: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise UserError(f"{file} is no job of a sweep")
    return require_harmless(content["config"], file)


def slug(swept: Sequence[str]) -> str:
    """A folder name from overrides: model.n_head=4, seed=0 -> n_head_4-seed_0. It holds no `=` and no separator."""
    parts = []
    for word in swept:
        key, _, value = word.partition("=")
        name = key.lstrip("+~").replace("/", ".").rpartition(".")[2]
        parts.append(re.sub(r"[^\w.-]+", "_", f"{name}_{value}"))
    return "-".join(parts)[:80].strip("-._")


def _is_swept(word: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return bool(OverridesParser.create().parse_override(word).is_sweep_override())


def _require_possible(command: Command, overrides: list[str]) -> None:
    """Composes the jobs first: a misspelt word ends the sweep before it begins. A job whose values do not fit each
    other is refused in its turn, unless all are."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    folder = config_folder()
    parsed = require_readable(command.name, overrides, folder, sweep=True)
    if any(word.startswith("hydra/sweeper") for word in overrides):
        return  # another sweeper makes up its values as it goes
    jobs = BasicSweeper.split_arguments([override for _, override in parsed], None)[0]
    faults: list[UserError] = []
    for arguments in jobs:
        try:
            check(compose(command.name, arguments, folder), command.settings)
        except UserError as error:
            faults.append(error)
    if len(faults) == len(jobs):
        raise faults[0]


def _new_folder(root: Path, name: str | None) -> Path:
    base = time.strftime("sweep-%Y-%m-%d_%H-%M-%S") if name is None else valid_name(name)
    if name and (root / name).exists():
        raise UserError(f"name={name}: {root / name} is there already; choose another name")
    for attempt in range(1, 1000):
        folder = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("a thousand sweeps began in one second")


def _multirun(folder: Path, overrides: list[str]) -> None:
    import hydra
    from hydra.core.override_parser.types import Quote, QuotedString

    place = QuotedString(str(folder).replace("${", "\\${"), Quote.single).with_quotes()
    own = [f"hydra.sweep.dir={place}", "hydra.sweep.subdir=.", "hydra.output_subdir=null"]
    own += ["hydra/hydra_logging=disabled", "hydra/job_logging=disabled"]
    before = sys.argv
    sys.argv = [before[0], "--multirun", *overrides, *own]
    try:
        with hydra_faults("train", overrides, config_folder()):
            hydra.main(config_path=str(config_folder()), config_name="train", version_base="1.3")(job)()
    finally:
        sys.argv = before


def _run_child(command: list[str]) -> int:
    """Waits for a process in a session of its own. An interrupt is handed on once, and the process may finish saving;
    a second one kills it."""
    child = subprocess.Popen(command, start_new_session=True)
    try:
        with _termination_interrupts():
            return child.wait()
    except KeyboardInterrupt:
        try:
            os.killpg(child.pid, signal.SIGINT)
            child.wait()
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        except ProcessLookupError:
            child.wait()
        raise


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGUSR1 act like Ctrl-C, or the job would live on without its sweep."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise Stopped

    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _mark(run: Path, cfg: dict[str, Any], state: State, error: str) -> None:
    """Writes what the job could not say itself, and leaves what it did say."""
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "config.yaml").is_file():
        write_config(run, cfg)
    status = read_status(run)
    if status.get("state") in (None, "running"):
        step, steps = status.get("step", 0), status.get("steps", 0)
        write_status(run, state, step=step, steps=steps, error=status.get("error") or error)


def _validation_loss(run: Path) -> float | None:
    """Of the last validation on the run's own validation split."""
    rows = [row for row in read_metrics(run) if row["kind"] == "validation" and row["name"] == "validation"]
    return rows[-1]["loss"] if rows else None


def _print_table(folder: Path) -> int:
    """One row a job; returns how many did not finish."""
    from rich.table import Table

    table = Table("job", "overrides", "state", "validation loss", title=str(folder))
    n_failed = 0
    files = sorted((folder / "jobs").glob("*.yaml"))
    for file in files:
        run = folder / file.stem
        swept = yaml.safe_load(file.read_text(encoding="utf-8"))["swept"]
        status, loss = read_status(run), _validation_loss(run)
        said = "" if loss is None else f"{loss:.4f}"
        state = status.get("state", "never started")
        n_failed += state != "finished"
        reason = f" ({status['error']})" if state == "failed" and status.get("error") else ""
        table.add_row(file.stem.partition("-")[0], " ".join(swept), state + reason, said)
    console = plain_console()
    console.print(table)
    if files:
        name = shlex.quote(run_name(folder / files[0].stem, folder.parent))
        console.print(f"each job is a run; the first is called {name}", soft_wrap=True)
    return n_failed
