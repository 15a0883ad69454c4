"""telemetry: what did attention do while these runs learned? First and last figures as a table, all of them drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softattn_lm.config.settings import TelemetrySettings, section
from softattn_lm.errors import UserError, writing
from softattn_lm.own_files import require_own_files
from softattn_lm.runs.find import find_run
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.names import run_name

# Of one run: step -> layer -> figure.
History = dict[int, dict[int, dict[str, float | None]]]

COLUMNS = {
    "entropy": ("entropy", ".2f"),
    "entropy_ratio": ("/ln n", ".2f"),
    "support": ("keys", ".1f"),
    "logit_abs_max": ("max|s|", ".1f"),
    "logit_std": ("std s", ".2f"),
    "first": ("first", ".2f"),
    "previous": ("prev", ".2f"),
    "induction": ("induct", ".2f"),
    "dead": ("dead", ".1%"),
}


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`words`: runs; none is the newest. Raises UserError for a run that is not there or has no telemetry."""
    settings = section(TelemetrySettings, cfg)
    named: list[str | None] = [*words] or [None]
    folders = [find_run(word, settings.runs) for word in named]
    names = [run_name(folder, settings.runs) for folder in folders]
    files = _files(settings.figure, folders[0])
    histories = [_history(folder, name) for folder, name in zip(folders, names, strict=True)]
    for name, history in zip(names, histories, strict=True):
        _show(name, history)
    from softattn_lm.commands.telemetry_figure import draw

    with writing(files[0]):
        draw(names, histories, files)
    print(f"figure: {', '.join(str(file) for file in files)}")


def _files(figure: str | None, folder: Path) -> list[Path]:
    if figure is None:
        require_own_files(folder)
        return [folder / "telemetry.png", folder / "telemetry.svg"]
    file = Path(figure).expanduser()
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"figure={figure} is no kind of figure; type a name that ends in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise UserError(f"figure={figure}: there is no folder {file.parent}")
    return [file]


def _history(folder: Path, name: str) -> History:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in read_metrics(folder):
        if row["kind"] == "telemetry":
            by_step.setdefault(row["step"], []).append(_checked(row, folder))
    if not by_step:
        raise UserError(
            f"run {name} has no telemetry: it validated nothing or was trained with training.telemetry=false"
        )
    from softattn_lm.evaluation.telemetry import per_layer

    return {step: per_layer(rows) for step, rows in sorted(by_step.items())}


def _checked(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Raises UserError for a row of telemetry that lacks its layer or holds something else in the place of a number."""
    from softattn_lm.evaluation.telemetry import FIGURES

    wrong = [name for name in FIGURES if not isinstance(row.get(name), int | float | None)]
    if not isinstance(row.get("layer"), int):
        wrong = ["layer"]
    if wrong:
        raise UserError(
            f"{folder / 'metrics.jsonl'} is damaged: a row of telemetry at step {row['step']} has no number as its "
            f"{wrong[0]}; remove that line"
        )
    return row | {name: row.get(name) for name in FIGURES}


def _show(name: str, history: History) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from softattn_lm.training.console import plain_console

    caption = Text("means over the heads of a layer, max|s| of all of them")
    table = Table(title=Text(f"attention in {name}"), caption=caption, box=box.SIMPLE, padding=0, pad_edge=False)
    for heading in ("layer", "step", *(heading for heading, _ in COLUMNS.values())):
        table.add_column(heading, justify="right", no_wrap=True)
    first, last = min(history), max(history)
    for layer in history[last]:
        for step in [step for step in dict.fromkeys((first, last)) if layer in history[step]]:
            cells = ((history[step][layer][figure], shape) for figure, (_, shape) in COLUMNS.items())
            numbers = ("" if value is None else format(value, shape) for value, shape in cells)
            table.add_row(str(layer), str(step), *numbers, end_section=step == last)
    plain_console().print(table)
