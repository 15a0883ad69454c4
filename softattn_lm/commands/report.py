"""report: what an ablation says, from its folder: verdicts, tables, figures and a page. See softattn_lm/ablation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softattn_lm.ablation import report as writing
from softattn_lm.ablation import sentences
from softattn_lm.config.settings import ReportSettings, section
from softattn_lm.errors import UserError, visible
from softattn_lm.runs.names import runs_folder


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`words`: one ablation, a folder or its name below `runs`. Raises UserError for one that is none."""
    settings = section(ReportSettings, cfg)
    if len(words) != 1:
        raise UserError(f"report reads one ablation, and {len(words)} came; type its folder or name")
    make(_found(words[0], settings.runs), settings.wandb)


def make(folder: Path, wandb: bool = True) -> writing.Report:
    """Written, told, and handed to wandb if its runs went there."""
    report = writing.write(folder)
    for line in _told(report):
        print(visible(line))
    logger = _logger(report) if wandb else None
    if logger is not None:
        from softattn_lm.commands.report_wandb import publish

        publish(report, logger)
    return report


def _found(word: str, runs: str) -> Path:
    folder = Path(word).expanduser()
    below = runs_folder(runs) / word
    return below if not folder.exists() and below.exists() else folder


def _told(report: writing.Report) -> list[str]:
    lines = [] if report.final else ["provisional: not all runs have ended; this reads the validation part only"]
    lines += report.said or ["no arm shares two seeds with the baseline yet"]
    lines += sentences.on_the_ladder(report.plan, report.judged)
    for each in report.judged:
        for arm, seeds in each.look.waiting.items():
            lines.append(f"missing: {arm}{sentences.at(each.size)}, seeds {', '.join(map(str, seeds))}")
    if report.final:
        needed = sentences.what_is_missing(report.plan, report.folder, report.judged)
        lines += [*needed.said, *([] if needed.command is None else [f"more seeds: {needed.command}"])]
    lines += [f"warning: {line}" for line in report.warnings]
    times = {0: "not yet", 1: "once"}.get(report.readings, f"{report.readings} times")
    lines.append(f"the test part was read {times}")
    return [*lines, f"report: {report.folder / 'report.html'}, report.md, table.csv, table.tex, runs.csv, figures/"]


def _logger(report: writing.Report) -> dict[str, Any] | None:
    """The settings of wandb that the runs had; None if they did not go there."""
    from softattn_lm.ablation.frame import read_runs

    for each in read_runs(report.folder):
        logger = each.config.get("logger")
        if isinstance(logger, dict) and logger.get("name") == "wandb":
            return logger
    return None
