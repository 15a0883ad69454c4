"""The same plan through submitit: its local mode gives the same table, and a stub `sbatch` shows what SLURM gets."""

import json
import os
import sys
from pathlib import Path

import pytest

from softattn_lm.ablation.executors.submitted import Submitit
from softattn_lm.errors import UserError
from softattn_lm.runs.status import read_status
from tests.ablation import ablate, losses, quick

TYPED = ["attention=sdpa,linear", "seeds=2", "steps=4"]


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.mark.slow
def test_submitit_in_its_local_mode_gives_the_table_of_the_slots(tmp_path: Path) -> None:
    assert ablate(tmp_path, *TYPED, "name=here", "slots=2") == 0
    assert ablate(tmp_path, *TYPED, "name=there", "slots=2", "executor=submitit_local") == 0
    here, there = (losses(tmp_path / "runs" / name) for name in ("here", "there"))
    assert here == there and len(here) == 4


def test_without_submitit_it_is_said_how_the_checkout_is_installed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of our name elsewhere may be a stranger's."""
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"type: pip install -c \.ci/constraints\.txt -e '\.\[slurm\]'$"):
        Submitit(tmp_path, tmp_path, [], cluster="slurm", slots=None, threads=1, gpus=0, parameters={})


def stub(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


def test_slurm_gets_one_array_and_what_it_has_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    stub(commands, "sbatch", f'for last; do :; done; cat "$last" >> {tmp_path}/got; echo Submitted batch job 123')
    stub(commands, "squeue", "for task in 0 1 2 3; do echo 123_$task; done")
    stub(commands, "srun", "exit 1")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    typed = [*TYPED, "name=x", "executor=slurm", "wait=false", "threads=2"]
    typed += ["+slurm.slurm_partition=short", "+slurm.timeout_min=90", "+slurm.slurm_array_parallelism=2"]
    assert ablate(tmp_path, *typed) == 0
    got = (tmp_path / "got").read_text()
    for line in ("--array=0-3%2", "--partition=short", "--time=90", "--cpus-per-task=2", "--job-name=x"):
        assert f"#SBATCH {line}" in got, got
    assert "4 runs are left" in capsys.readouterr().out
    folder = tmp_path / "runs" / "x"
    known = json.loads((folder / "submitted" / "jobs.json").read_text())
    assert {run: of["job"] for run, of in known.items()} == {
        f"report/{arm}/seed-{seed}": f"123_{2 * seed + index}"
        for seed in (0, 1)
        for index, arm in enumerate(("sdpa", "linear"))
    }
    assert not read_status(folder / "report" / "sdpa" / "seed-0"), "nothing has run"
    assert ablate(tmp_path, *typed) == 0
    assert (tmp_path / "got").read_text() == got, "SLURM still has them"
    stub(commands, "squeue", "exit 0")
    assert ablate(tmp_path, *typed) == 0
    assert (tmp_path / "got").read_text() == got * 2, "SLURM has lost them, and they are submitted again"
