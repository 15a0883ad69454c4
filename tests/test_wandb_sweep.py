"""scripts/wandb_sweep.yaml, expanded by the code of wandb's own agent, is something that `train` takes."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from softattn_lm.commands.ablate import composed
from softattn_lm.training.tracking import tracked

wandb_agent = pytest.importorskip("wandb.wandb_agent")
ROOT = Path(__file__).parent.parent
SWEEP = yaml.safe_load((ROOT / "scripts" / "wandb_sweep.yaml").read_text(encoding="utf-8"))


def typed(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What the agent would start for these values, without a server that hands them out."""
    monkeypatch.chdir(folder)
    started: list[list[str]] = []

    def process(command: list[str], **_: Any) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace()

    monkeypatch.setattr(wandb_agent, "AgentProcess", process)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # the agent sets them for good
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    agent = object.__new__(wandb_agent.Agent)
    vars(agent).update(
        _sweep_command=list(SWEEP["command"]),
        _function=None,
        _forward_signals=False,
        _run_processes={},
        _in_jupyter=False,
    )
    args = {key: {"value": value} for key, value in values.items()}
    agent._command_run({"run_id": "r1", "program": SWEEP["program"], "args": args})
    (command,) = started
    return command


def test_what_the_agent_starts_is_a_run_with_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = SWEEP["parameters"]
    for index in range(3):
        values = {"lr": (of["lr"]["min"], 1e-05, of["lr"]["max"])[index]}
        values |= {key: of[key]["values"][index] for key in ("model.dropout", "seed")}
        assert values.keys() == of.keys()
        env, python, program, *words = typed(values, monkeypatch, tmp_path)
        assert shutil.which(env) and python == "python" and os.path.isfile(ROOT / program)
        config = composed(words)
        assert (config["lr"], config["model"]["dropout"], config["seed"]) == tuple(values.values())
        assert config["logger"]["name"] == "wandb" and config["steps"] == 500


def test_values_of_other_kinds_reach_train_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = typed({"projections": "shared_kv", "training.compile": False}, monkeypatch, tmp_path)[3:]
    config = composed(words)
    assert config["training"]["compile"] is False
    assert config["model"]["projections"] == composed(["model=plain", "projections=shared_kv"])["model"]["projections"]


def test_what_the_search_looks_at_is_what_a_run_logs() -> None:
    row = json.loads('{"kind": "validation", "name": "validation", "step": 3, "loss": 2.0}')
    assert SWEEP["metric"]["name"] in tracked(row)[0]
