"""`train -m`: one fresh process, one folder and one resolved config a job; a failing job does not stop the others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from softattn_lm.commands import COMMANDS, sweep
from softattn_lm.config.argv import sort
from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config, write_config
from softattn_lm.runs.find import find_run
from softattn_lm.runs.status import read_status, write_status

TRAIN = COMMANDS["train"]


def start(*argv: str) -> None:
    sweep.sweep(TRAIN, sort(TRAIN, ["-m", *argv], {"seed", "runs", "name"}).overrides)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configs that would be trained, in order; seed=13 fails."""
    configs: list[dict[str, Any]] = []

    def pretend(command: list[str]) -> int:
        assert command[:5] == [sys.executable, "-m", "softattn_lm", "train", "--job"]
        cfg = sweep.read_job(command[5])
        configs.append(cfg)
        if cfg["seed"] == 13:
            return 70
        run = Path(cfg["runs"]) / cfg["name"]
        run.mkdir()
        write_config(run, cfg)
        row = {"kind": "validation", "step": 1, "loss": 2.5 + cfg["seed"], "name": "validation"}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        write_status(run, "finished", step=1, steps=1)
        return 0

    monkeypatch.setattr(sweep, "_run_child", pretend)
    return configs


def test_eight_combinations_are_eight_runs_with_configs_of_their_own(
    tmp_path: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    start("attention=formula,sdpa", "scale=none,inverse_sqrt", "seed=0,1", f"runs={tmp_path}", "name=s", "steps=3")
    assert [(c["attention"]["_target_"].rsplit(".", 1)[1], c["seed"]) for c in started] == [
        (kernel, seed) for kernel in ("Formula", "SDPA") for _ in range(2) for seed in (0, 1)
    ]
    runs = sorted(path.parent for path in tmp_path.glob("s/*/config.yaml"))
    assert len(runs) == 8 and runs[0].name == "00-attention_formula-scale_none-seed_0"
    assert not any("=" in run.name for run in runs)
    assert [read_config(run) for run in runs] == started
    assert {(c["logger"]["group"], c["steps"]) for c in started} == {("s", 3)}
    said = capsys.readouterr().out
    assert "3.5000" in said and find_run(said.split()[-1], tmp_path) == runs[0]
    assert not list(tmp_path.rglob(".hydra"))


def test_a_failing_job_is_marked_and_the_rest_go_on(
    tmp_path: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        start("seed=13,1", f"runs={tmp_path}", "name=s")
    assert stop.value.code == 1 and len(started) == 2
    states = {run.name: read_status(run)["state"] for run in tmp_path.glob("s/[0-9]*")}
    assert states == {"00-seed_13": "failed", "01-seed_1": "finished"}
    assert "exit status 70" in read_status(tmp_path / "s" / "00-seed_13")["error"]


def test_values_that_do_not_fit_each_other_fail_their_own_job_only(
    tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    with pytest.raises(SystemExit):
        start("model.n_head=3,4", f"runs={tmp_path}", "name=s")
    assert [c["model"]["n_head"] for c in started] == [4]
    assert "type model.n_head=2" in read_status(tmp_path / "s" / "00-n_head_3")["error"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["attention=formula,spda"], "did you mean sdpa?"),
        (["model.n_haed=1,2"], "did you mean model.n_head?"),
        (["model.n_head=3,5"], "does not divide"),
        (["resume=x", "seed=0,1"], "one run is resumed at a time"),
    ],
)
def test_a_fault_of_every_job_ends_the_sweep_before_it_begins(
    argv: list[str], said: str, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    with pytest.raises(UserError) as error:
        start(*argv, f"runs={tmp_path / 'runs'}")
    assert said in str(error.value) and not started and not (tmp_path / "runs").exists()


def test_paths_survive_a_sweep_as_typed(
    tmp_path: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "it's, a (b) [c] ${d} = ~"
    start("data=text_file", f"data.path={odd}/x, y.txt", "seed=0,1", f"runs={odd}")
    assert "(b) [c] ${d}" in " ".join(capsys.readouterr().out.split())
    assert {c["data"]["path"] for c in started} == {f"{odd}/x, y.txt"}
    assert len(list(odd.glob("sweep-*/0*/config.yaml"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == [odd.name]


def test_two_sweeps_never_share_a_folder(tmp_path: Path) -> None:
    folders = {sweep._new_folder(tmp_path, None) for _ in range(5)}
    assert len(folders) == 5
    with pytest.raises(UserError, match="name=a/b contains"):
        sweep._new_folder(tmp_path, "a/b")
    with pytest.raises(UserError, match="choose another name"):
        sweep._new_folder(tmp_path, next(iter(folders)).name)


def test_a_slug_is_a_folder_name() -> None:
    assert (
        sweep.slug(["model.n_head=4", "model/size=nano", "data.path=/a b/c=d,(e)"])
        == "n_head_4-size_nano-path__a_b_c_d_e"
    )


CHILD = """
import signal, sys, time
def stop(*_):
    time.sleep(0.5); open(sys.argv[1], "w").write("saved"); sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import sys
from softattn_lm.commands.sweep import _run_child
try: _run_child([sys.executable, "-c", sys.argv[1], sys.argv[2]])
except KeyboardInterrupt: print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_a_sweep_lets_the_job_save_first(number: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    sweep_process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert sweep_process.stdout is not None and sweep_process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    os.kill(sweep_process.pid, number)
    said, _ = sweep_process.communicate(timeout=30)
    assert (said, file.read_text()) == ("stopped\n", "saved")


def test_an_interrupt_marks_the_job_and_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_run_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start("seed=0,1", f"runs={tmp_path}", "name=s")
    assert [read_status(run)["state"] for run in tmp_path.glob("s/[0-9]*")] == ["interrupted"]


def test_a_job_file_is_plain_yaml_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"seed": 0}))
    with pytest.raises(UserError, match="no job of a sweep"):
        sweep.read_job(str(tmp_path / "x.yaml"))


@pytest.mark.slow
def test_a_sweep_trains_in_fresh_processes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Emma Woodhouse, handsome, clever, and rich. " * 400, encoding="utf-8")
    words = ["data=text_file", f"data.path={text}", "trainer=cpu", "steps=2", "model.n_layer=1", "model.d_model=32"]
    words += ["model.n_head=2", "model.context=16", f"runs={tmp_path}", "name=s", "logger=wandb", "seed=0,1"]
    answer = subprocess.run(
        [sys.executable, "-m", "softattn_lm", "train", "-m", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    runs = sorted(path.parent for path in tmp_path.glob("s/*/config.yaml"))
    assert [read_status(run)["state"] for run in runs] == ["finished", "finished"]
    assert [read_config(run)["seed"] for run in runs] == [0, 1]
    assert len(list(tmp_path.glob("s/*/wandb/offline-run-*"))) == 2
    assert (tmp_path / "cache").is_dir() and not (tmp_path / "s" / "cache").exists()
