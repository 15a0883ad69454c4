"""The wandb files of an offline ablation, read back: a run per job, in its group, with arm, seed and stage."""

import json
import os
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from softattn_lm.runs.status import read_status
from tests.ablation import ablate, quick, started
from tests.test_ablate_kill import until, victims
from tests.wandb_files import exit_code, history, records


def described(run: Path) -> dict[str, Any]:
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    (found,) = (record.run for record in records(file) if record.WhichOneof("record_type") == "run")
    return {
        "group": found.run_group,
        "job_type": found.job_type,
        "name": found.display_name,
        "tags": set(found.tags),
        "config": {item.key: item.value_json for item in found.config.update},
    }


def test_every_job_is_a_run_of_the_group_and_those_that_failed_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    (tmp_path / "q.yaml").write_text("arms:\n  good: []\n  hot: [lr=1e30, training.clip=null]\nseeds: 2\n")
    typed = [str(tmp_path / "q.yaml"), "slots=2", "steps=4", "logger=wandb", "training.log_every=1"]
    assert ablate(tmp_path, *typed) == 0
    folder = tmp_path / "runs" / "q" / "report"
    assert len(list(folder.rglob("*.wandb"))) == 4
    for arm, code in (("good", 0), ("hot", 1)):
        for seed in (0, 1):
            run = folder / arm / f"seed-{seed}"
            found = described(run)
            assert (found["group"], found["job_type"], found["name"]) == ("q", "report", f"{arm}-seed{seed}")
            assert found["tags"] == {f"arm:{arm}", f"seed:{seed}"}
            assert found["config"]["seed"] == str(seed) and json.loads(found["config"]["ablation"])["arm"] == arm
            assert exit_code(run) == code
            steps = [row["_step"] for row in history(run)]
            assert steps and all(a < b for a, b in pairwise(steps))


@pytest.mark.slow
def test_a_run_that_is_killed_as_often_as_it_is_tried_is_marked_failed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    process = started(
        tmp_path,
        "attention=sdpa,linear",
        "seeds=2",
        "slots=1",
        "name=x",
        "steps=3000",
        "training.val_every=3000",
        "logger=wandb",
    )
    run = folder / "report" / "sdpa" / "seed-0"

    def another(killed: int) -> bool:
        return (run / "wandb" / "id").is_file() and bool(set(victims(folder)) - {killed})

    last = 0
    for _ in range(2):
        until(partial(another, last))
        (last,) = set(victims(folder)) - {last}
        os.kill(last, signal.SIGKILL)
    until(lambda: exit_code_of(run) == 1)
    assert "SIGKILL" in read_status(run)["error"] and read_status(run)["state"] == "failed"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130


def exit_code_of(run: Path) -> int | None:
    files = list((run / "wandb").glob("offline-run-*/*.wandb"))
    try:
        return exit_code(run) if len(files) == 1 else None
    except FileNotFoundError:  # it is being written anew
        return None
