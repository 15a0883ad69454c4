"""Weights & Biases beside metrics.jsonl, when asked for. Nothing here asks a question, no run waits for the network.

metrics.jsonl is the record. wandb gets a copy of its rows: online if there is a key and the server answers, else into
`<run>/wandb/offline-run-*`. Whatever fails is said in one line (a warning) with what to type, and training goes on.
"""

from __future__ import annotations

import netrc
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import urlopen

from lightning.pytorch.loggers import Logger

from softattn_lm.config.settings import LoggerSettings
from softattn_lm.errors import UserError
from softattn_lm.evaluation.telemetry import per_layer
from softattn_lm.runs.files import replace_text
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.processes import is_first_process

ANSWER = 3.0  # seconds for the server to answer at all
BEGIN = 5.0  # seconds for it to take a run
END = 5.0  # seconds for it to take what is left at the end


class Tracker(Logger):
    """Hands rows to a wandb run. None: not the first process, or wandb takes nothing. After a fault it is silent, and
    `finish` says so."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run
        self.fault: str | None = None
        self.exit_code = 0

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str | None:
        return None if self.run is None else str(self.run.id)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The config was given to the run when it began."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.run is None or self.fault is not None:
            return
        try:
            self.run.log(metrics, step=step)
        except _faults() as error:
            self.fault = _reason(error)

    def finalize(self, status: str) -> None:
        """Lightning says here how the run ended: "success", "failed" or "interrupted"."""
        self.exit_code = int(status == "failed")

    def finish(self) -> None:
        """Waits at most END seconds for what is not sent yet. A run that failed is marked failed."""
        if self.run is None:
            return
        try:
            self.run.finish(exit_code=self.exit_code)
        except TimeoutError:
            self.fault = f"it did not take everything within {END:.0f} s"
        except _faults() as error:
            self.fault = self.fault or _reason(error)
        if self.fault is not None:
            kept = _typed(self.run)
            warnings.warn(
                f"wandb has not all rows of this run ({self.fault}); metrics.jsonl has; send them later with: "
                f"wandb sync {kept}",
                stacklevel=2,
            )


def make_loggers(settings: LoggerSettings, folder: Path, config: dict[str, Any]) -> list[Logger]:
    """Lightning's loggers of a run: none but wandb's, as csv and none are served by metrics.jsonl."""
    if settings.name != "wandb":
        return []
    os.environ.setdefault("WANDB_SILENT", "true")
    # wandb reports its own troubles to its makers; where they cannot be reached that holds the process for ten seconds.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            "logger=wandb needs the package wandb; install it with: pip install wandb, or type logger=csv"
        ) from None
    if not is_first_process():
        return [Tracker(None)]
    tracker = Tracker(_begin(settings, folder, config))
    if tracker.run is not None and tracker.run.offline and not _was_online(folder):
        for values, step in replayed(read_metrics(folder)):
            tracker.log_metrics(values, step)
    return [tracker]


def mark_failed(folder: Path, config: dict[str, Any]) -> None:
    """What a killed process could not tell its tracker: an offline run is written anew from the record, with its end.

    One that was online is found dead by the server itself.
    """
    if (folder / "wandb" / "id").is_file() and not _was_online(folder):
        loggers = make_loggers(LoggerSettings(**config["logger"]), folder, config)
        for logger in loggers:
            logger.finalize("failed")
        finish_loggers(loggers)


def tracked(row: dict[str, Any]) -> tuple[dict[str, float], int]:
    """A row of metrics.jsonl as wandb shows it, {"train/loss": ...}, and its step."""
    kind = row["name"] if row["kind"] == "validation" else row["kind"]
    values = {key: value for key, value in row.items() if isinstance(value, (int, float)) and key != "step"}
    return {f"{kind}/{key}": value for key, value in values.items()}, row["step"]


def replayed(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, float], int]]:
    """All rows of a record as they were shown; those of the heads of one step together, a layer at a time."""
    for (kind, step), group in groupby(rows, key=lambda row: (row["kind"], row["step"])):
        if kind == "telemetry":
            yield layer_figures(list(group)), step
        else:
            yield from map(tracked, group)


def layer_figures(heads: list[dict[str, Any]]) -> dict[str, float]:
    """What the heads of each layer show on average, {"telemetry/layer0/entropy": ...}."""
    return {
        f"telemetry/layer{layer}/{name}": value
        for layer, whole in per_layer(heads).items()
        for name, value in whole.items()
        if value is not None
    }


def _begin(settings: LoggerSettings, folder: Path, config: dict[str, Any]) -> Any:
    """A wandb run, online if possible, else on disk, None if not even that. One tracker run for one run folder, also
    when it is continued."""
    place = folder / "wandb"
    known = known_id(place)
    given: dict[str, Any] = {
        "name": folder.name, "dir": folder.resolve(), "project": settings.project, "entity": settings.entity,
        "group": settings.group, "tags": settings.tags, "resume": "allow", "config": config,
    } | _in_ablation(config.get("ablation"), settings)  # fmt: skip
    fault = run = None
    if is_logged_in():
        fault = unreachable(base_url())
        if fault is None:
            run, fault = _init(place, given | {"id": known, "mode": "online"})
    if run is None:
        if known is not None and not _was_online(folder):
            remove_torn(place)
        run, why = _init(place, given | {"id": known, "mode": "offline"})
        if run is None:
            # A variable with something in it that wandb does not take keeps it from writing to disk, too.
            with _no_variables():
                run, _ = _init(place, given | {"mode": "offline"})
            fault = fault or why
    if run is None:
        warnings.warn(f"wandb takes nothing of this run ({fault}); metrics.jsonl has its rows", stacklevel=2)
        return None
    if fault is not None:
        warnings.warn(
            f"wandb at {base_url()} takes no run ({fault}); this run is written to disk instead, send it later with: "
            f"wandb sync {_typed(run)}",
            stacklevel=2,
        )
    try:
        replace_text(place / "id", run.id)
    except OSError as error:
        warnings.warn(f"wandb will show a new run when this one is continued ({_reason(error)})", stacklevel=2)
    return run


def _init(place: Path, given: dict[str, Any]) -> tuple[Any, str | None]:
    """(the run, None) or (None, why there is none)."""
    import wandb
    from wandb.sdk.mailbox.mailbox import MailboxClosedError

    limits: dict[str, Any] = {"init_timeout": BEGIN, "finish_timeout": END, "finish_timeout_raises": True}
    try:
        place.mkdir(exist_ok=True)
        how = wandb.Settings(console="off", silent=True, x_graphql_timeout_seconds=BEGIN, **limits)
        with _own_service():
            try:
                return wandb.init(**given, settings=how), None
            except MailboxClosedError:  # the service that an earlier run of this process had has died
                with suppress(*_faults()):
                    wandb.teardown()
                return wandb.init(**given, settings=how), None
    except _faults() as error:
        return None, _reason(error)


@contextmanager
def _own_service() -> Iterator[None]:
    """wandb tells the processes that this one starts of its service by a variable, and they would share it: a service
    that stands in another folder, and that ends with whoever started it."""
    os.environ.pop("WANDB_SERVICE", None)
    try:
        yield
    finally:
        os.environ.pop("WANDB_SERVICE", None)


def _typed(run: Any) -> str:
    """The folder of a wandb run as a person types it from here. wandb's own process may stand somewhere else."""
    folder = Path(run.dir).parent
    here = Path.cwd()
    return shlex.quote(str(folder.relative_to(here) if folder.is_relative_to(here) else folder))


def known_id(place: Path) -> str | None:
    """The id that the run had; None if it has had none, or the file holds something else."""
    try:
        known = (place / "id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return known if re.fullmatch(r"[\w-]{1,64}", known, re.ASCII) else None


def remove_torn(place: Path) -> None:
    """All rows are written anew: what a killed process left lacks its last rows and its end. A link to a folder
    somewhere else is no such thing."""
    for torn in place.glob("offline-run-*"):
        if not place.is_symlink() and not torn.is_symlink():
            shutil.rmtree(torn, ignore_errors=True)


@contextmanager
def _no_variables() -> Iterator[None]:
    """No WANDB_* in the environment, but for those that keep wandb quiet."""
    quiet = ("WANDB_SILENT", "WANDB_ERROR_REPORTING")
    before = {key: value for key, value in os.environ.items() if key.startswith("WANDB_") and key not in quiet}
    for key in before:
        del os.environ[key]
    try:
        yield
    finally:
        os.environ |= before


def _in_ablation(ablation: dict[str, Any] | None, settings: LoggerSettings) -> dict[str, Any]:
    """Where wandb shows a run of an ablation: in the group of its name, by stage, called after arm and seed."""
    if ablation is None:
        return {}
    known = {key: str(ablation[key]) for key in ("size", "arm") if ablation.get(key) is not None}
    return {
        "name": "-".join([*known.values(), *([f"rate{r}"] if (r := ablation.get("rate")) is not None else [])])
        + f"-seed{ablation['seed']}",
        "group": settings.group or ablation["name"],
        "job_type": ablation["stage"],
        "tags": [*settings.tags, *(f"{key}:{value}"[:64] for key, value in known.items()), f"seed:{ablation['seed']}"],
    }


def _was_online(folder: Path) -> bool:
    """Then the server has the earlier rows, and what is on disk here are later ones."""
    return any((folder / "wandb").glob("run-*"))


def base_url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def unreachable(url: str) -> str | None:
    """Why nothing answers there within ANSWER seconds; None if anything does. wandb itself would wait for longer, and
    again when the process ends."""
    if not url.startswith(("http://", "https://")):
        return f"{url!r} is no http:// or https:// address"
    try:
        with urlopen(url, timeout=ANSWER):
            return None
    except HTTPError:
        return None  # an answer, though to another question
    except (OSError, ValueError, OverflowError, HTTPException) as error:
        return _reason(getattr(error, "reason", None) or error)


def is_logged_in() -> bool:
    """Whether wandb has a key, in the environment or in ~/.netrc, and is not told by WANDB_MODE to stay offline."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return False
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = urlparse(base_url()).hostname or ""
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False


def finish_loggers(loggers: list[Logger]) -> None:
    """wandb keeps one run per process until it is told to finish; the next in this process would share it."""
    for logger in loggers:
        if isinstance(logger, Tracker):
            logger.finish()


def _faults() -> tuple[type[BaseException], ...]:
    """What wandb raises for a server that refuses, a setting it does not take, and when its own process has died."""
    import wandb
    from wandb.sdk.mailbox import HandleAbandonedError
    from wandb.sdk.mailbox.mailbox import MailboxClosedError

    return (wandb.Error, HandleAbandonedError, MailboxClosedError, OSError, RuntimeError, ValueError)


def _reason(error: Any) -> str:
    lines = str(error).strip().splitlines()
    if lines and lines[0].endswith("for Settings"):  # pydantic: then the setting, then what is wrong with it
        return " ".join(" ".join(lines[1:3]).partition(" [type=")[0].split())
    return lines[0] if lines else type(error).__name__
