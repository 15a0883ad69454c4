"""The table and the figures of a report as one wandb run of the ablation's group, job type `report`.

One run per ablation however often it is reported: online it is taken up again, and what is on disk without a key or a
server, below <folder>/wandb, is written anew.
"""

from __future__ import annotations

import os
import shlex
import warnings
from pathlib import Path
from typing import Any

from softattn_lm.ablation.report import Report
from softattn_lm.runs.files import replace_text
from softattn_lm.training.tracking import BEGIN, END, base_url, is_logged_in, known_id, remove_torn, unreachable


def publish(report: Report, logger: dict[str, Any]) -> None:
    """logger: the settings of the runs: project, group, entity, tags."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ModuleNotFoundError:
        warnings.warn("the report is not in wandb: the package wandb is not installed", stacklevel=2)
        return
    place = report.folder / "wandb"
    online = is_logged_in() and unreachable(base_url()) is None
    run_id = known_id(place) if online else None
    if not online:
        remove_torn(place)
    limits: dict[str, Any] = {"init_timeout": BEGIN, "finish_timeout": END, "finish_timeout_raises": True}
    try:
        place.mkdir(exist_ok=True)
        run = wandb.init(
            **_identity(report, logger), id=run_id, resume="allow", dir=report.folder,
            mode="online" if online else "offline",
            settings=wandb.Settings(console="off", silent=True, x_graphql_timeout_seconds=BEGIN, **limits),
        )  # fmt: skip
        if online:
            replace_text(place / "id", run.id)
        run.log(_shown(report))
        run.summary.update({"readings_of_test": report.readings, "verdicts": report.said})
        run.finish()
    except (wandb.Error, OSError, RuntimeError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"wandb has not all of this report ({said}); its files have; send it later with: wandb sync "
            f"{shlex.quote(str(place))}/*run-*",
            stacklevel=2,
        )


def _identity(report: Report, logger: dict[str, Any]) -> dict[str, Any]:
    plan = report.plan
    return {
        "name": f"{plan.name}-report",
        "job_type": "report",
        "project": logger.get("project"),
        "entity": logger.get("entity"),
        "group": logger.get("group") or plan.name,
        "tags": [*(logger.get("tags") or []), "table"],
        "config": {"question": plan.question, "hypothesis": plan.hypothesis, "arms": plan.arms, "seeds": plan.seeds},
    }


def _shown(report: Report) -> dict[str, Any]:
    import wandb

    figures: Path = report.folder / "figures"
    table = wandb.Table(columns=list(report.table.head), data=[list(row) for row in report.table.rows])
    pictures = {
        f"figures/{picture.name}": wandb.Image(str(figures / f"{picture.name}.png"), caption=picture.caption)
        for picture in report.pictures
    }
    return {"differences": table, **pictures}
