"""`ablate`, from what is typed to run folders: planned, tuned, reported, continued."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from softattn_lm.ablation import journal
from softattn_lm.ablation.plan import Plan
from softattn_lm.commands import ablate as command
from softattn_lm.commands.ablate import make_report
from softattn_lm.runs.config import read_config
from softattn_lm.runs.status import read_status
from tests.ablation import ablate, losses, quick, rows

ARMS = "attention=sdpa,linear"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.mark.slow
def test_a_question_is_tuned_and_reported_on_fresh_seeds_and_asked_again_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "make_report", make_report)  # this one writes its report
    typed = [ARMS, "seeds=3", "tune=lr", "trials=3", "slots=2", "name=x", "steps=6", "training.val_every=6"]
    typed += ["lines=true"]
    assert ablate(tmp_path, *typed) == 0
    folder = tmp_path / "runs" / "x"
    plan = Plan.read(folder)
    assert plan.baseline == "sdpa" and plan.seeds == [0, 1, 2] and plan.tune is not None
    tuned = [read_config(file.parent) for file in folder.glob("tune/*/*/summary.json")]
    tried = {arm: sorted({c["lr"] for c in tuned if c["ablation"]["arm"] == arm}) for arm in plan.arms}
    extended = journal.read(folder, "grid_extended")
    assert tried["sdpa"] == tried["linear"] and len(tried["sdpa"]) == 3 + len(extended)
    assert len(tuned) == 2 * 3 * len(tried["sdpa"])
    chosen = {row["arm"]: row for row in journal.read(folder, "chosen_rate")}
    for arm, row in chosen.items():
        means = {float(lr): np.mean(list(of.values())) for lr, of in row["losses"].items()}
        assert min(tried[arm]) <= row["lr"] <= max(tried[arm])
        assert abs(np.log2(row["lr"] / min(means, key=means.__getitem__))) <= 2
    reported = {arm: [read_config(folder / "report" / arm / f"seed-{seed}") for seed in range(3)] for arm in plan.arms}
    for arm, configs in reported.items():
        assert {c["lr"] for c in configs} == {c["optimizer"]["lr"] for c in configs} == {chosen[arm]["lr"]}
        assert [c["seed"] for c in configs] == [0, 1, 2]
        assert configs[0]["ablation"] == {
            "name": "x", "arm": arm, "seed": 0, "stage": "report", "size": None, "rate": None
        }  # fmt: skip
    assert not {c["seed"] for c in tuned} & {0, 1, 2}, "what was tuned on is not reported on"
    assert not list(folder.glob("tune/*/*/scores/test.npz")), "tuning has read the test part"
    (reference,) = folder.glob("reference/*/*")
    config = read_config(reference)
    assert reference.relative_to(folder).as_posix() == "reference/uniform/seed-0"
    assert config["lr"] == chosen["sdpa"]["lr"] and config["model"]["attention"]["_target_"].endswith(".Uniform")
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("summary.json")}
    assert ablate(tmp_path, *typed) == 0
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("summary.json")} == before
    assert len(journal.read(folder, "chosen_rate")) == 2
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "linear" in text and "| uniform | for scale | 1 |" in text and "-gram | for scale |" in text


def test_seeds_and_arms_come_on_top_and_are_logged_as_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate(tmp_path, ARMS, "seeds=2", "slots=2", "name=x", "steps=2") == 0
    folder = tmp_path / "runs" / "x"
    first = losses(folder)
    assert ablate(tmp_path, f"{ARMS},formula", "seeds=3", "slots=2", "name=x", "steps=2", "smallest=0.5") == 0
    assert losses(folder).items() > first.items() and len(losses(folder)) == 9
    events = {row["event"]: row for row in journal.read(folder)}
    assert events["added_seeds"]["seeds"] == [2] and events["added_arms"]["arms"] == ["formula"]
    assert events["edited"]["changes"] == {"smallest": [0.01, 0.5]} and Plan.read(folder).smallest == 0.01
    assert Plan.read(folder).seeds_at_start == [0, 1]
    assert "smallest was 0.01 and is now 0.5" in capsys.readouterr().out


def test_a_failing_arm_is_named_with_its_reason_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.yaml").write_text(
        "arms:\n  good: []\n  wide: [model.mlp_width=8]\n  bad: [attention=linear, position=alibi]\nseeds: 2\n"
    )
    assert ablate(tmp_path, str(tmp_path / "q.yaml"), "slots=2", "steps=2") == 1
    assert sorted(losses(tmp_path / "runs" / "q")) == [f"report/{a}/seed-{s}" for a in ("good", "wide") for s in (0, 1)]
    assert "arm bad is left out" in (said := capfd.readouterr().out) and "alibi" in said
    (failed,) = journal.read(tmp_path / "runs" / "q", "failed")
    assert failed["arm"] == "bad" and "alibi" in failed["reason"]


def test_a_run_that_diverges_is_a_result_and_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("arms:\n  good: []\n  hot: [lr=1e30, training.clip=null]\nseeds: 2\n")
    for _ in range(2):
        assert ablate(tmp_path, str(tmp_path / "q.yaml"), "slots=2", "steps=4") == 0
    folder = tmp_path / "runs" / "q"
    assert "no longer finite" in read_status(folder / "report" / "hot" / "seed-0")["error"]
    assert len(rows(folder / "slots.jsonl")) == 4


def test_arms_share_initial_values_and_windows_seed_by_seed(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("arms:\n  one: []\n  two: [scale=learned]\n  same: []\nseeds: 2\n")
    assert ablate(tmp_path, str(tmp_path / "q.yaml"), "slots=2", "steps=2", "training.log_every=1") == 0
    folder = tmp_path / "runs" / "q" / "report"

    def first(arm: str, seed: int) -> float:
        trained = rows(folder / arm / f"seed-{seed}" / "metrics.jsonl")
        return next(row["loss"] for row in trained if row["kind"] == "train")

    # The learned scale begins as 1/sqrt(d): before the first update both arms are one model on the same samples.
    assert first("one", 0) == pytest.approx(first("two", 0), abs=1e-6) and first("one", 0) != first("one", 1)
    for seed in (0, 1):
        scores = [
            dict(np.load(folder / arm / f"seed-{seed}" / "scores" / "test.npz")) for arm in ("one", "two", "same")
        ]
        assert np.array_equal(scores[0]["tokens"], scores[1]["tokens"])
        assert np.array_equal(scores[0]["nats"], scores[2]["nats"]) and not np.array_equal(
            scores[0]["nats"], scores[1]["nats"]
        )


def test_six_jobs_keep_three_slots_busy_each_with_a_port_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablate(tmp_path, ARMS, "seeds=3", "slots=3", "name=x", "steps=60") == 0
    assert re.search(
        r"slots were busy \d+ % of the time, \d+\.\d s per run beside its training", capsys.readouterr().out
    )
    jobs = rows(tmp_path / "runs" / "x" / "slots.jsonl")
    assert len(jobs) == 6 and {job["code"] for job in jobs} == {0}
    slots = {n: sorted((j for j in jobs if j["slot"] == n), key=lambda j: j["start"]) for n in (0, 1, 2)}
    assert all(slots.values()) and len({job["port"] for job in jobs}) == 3
    assert all(len({job["port"] for job in of}) == 1 for of in slots.values())
    for of in slots.values():
        assert all(a["end"] <= b["start"] for a, b in pairwise(of)), "a slot had two runs at once"
    # Idle: from the end of a run to the start of the next in its slot.
    busy = sum(job["end"] - job["start"] for job in jobs)
    whole = sum(of[-1]["end"] - of[0]["start"] for of in slots.values())
    assert busy / whole >= 0.9
    assert len({job["pid"] for job in jobs}) == 6
    # Of processors, as a busy machine tells no other time: all of a run, its sixty steps included.
    assert max(job["cpu"] for job in jobs) < 1.5


def test_what_is_wrong_is_told_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for typed, said in (
        (["attention=sdpa,liner"], "did you mean linear"),
        (["attention=sdpa,linear", "scale=none,learned"], "write them in a yaml file"),
        (["attention=sdpa"], "name a question, or arms"),
        (["scael"], "did you mean scale"),
        ([ARMS, "seeds=1"], "an interval needs 2 seeds"),
        ([ARMS, "tune=none", "trials=3"], "tune=none tries none"),
        ([ARMS, "baseline=flex"], "baseline=flex is no arm"),
        ([ARMS, "steps=2", "model.n_haed=3"], "did you mean model.n_head"),
    ):
        assert ablate(tmp_path, *typed) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("*/plan.json"))


def test_a_dry_run_says_what_it_would_cost_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablate(tmp_path, ARMS, "seeds=3", "tune=lr", "slots=1", "name=x", "dry_run=true", "lines=true") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "37 runs, 0 of them done" in said and "uniform" in said and "Nothing was trained" in said
    assert not (tmp_path / "runs" / "x").exists()


def test_a_typed_question_is_saved_and_asked_again_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ablate(tmp_path, ARMS, "seeds=2", "slots=2", "steps=2", "save_as=mine") == 0
    before = losses(tmp_path / "runs" / "mine")
    assert ablate(tmp_path, "mine", "slots=2", "steps=2") == 0
    assert losses(tmp_path / "runs" / "mine") == before and len(before) == 4
    assert not journal.read(tmp_path / "runs" / "mine", "edited")


def test_parameters_are_matched_by_the_width_of_the_mlp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["projections=separate,shared_kv", "seeds=2", "slots=2", "steps=2", "name=x", "match=parameters"]
    assert ablate(tmp_path, *typed) == 0
    folder = tmp_path / "runs" / "x"
    one, two = (
        json.loads((folder / "report" / arm / "seed-0" / "summary.json").read_text())["parameters"]
        for arm in ("separate", "shared_kv")
    )
    assert one == two
    assert Plan.read(folder).matched == {"": {"shared_kv": ["model.mlp_width=72"]}}
    assert "shared_kv has +0.00% parameters" in capsys.readouterr().out
    # Tenths of 3,000 characters: one validation, and the test part once.
    assert json.loads((folder / "measured" / "separate.json").read_text())["read_tokens"] == 300 + 300


@pytest.mark.slow
def test_a_run_may_take_several_devices_and_loses_nothing_by_it(tmp_path: Path) -> None:
    typed = [ARMS, "seeds=2", "steps=4", "model.dropout=0"]
    assert ablate(tmp_path, *typed, "name=one", "slots=2") == 0
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    assert ablate(tmp_path, *typed, *two, "name=two", "slots=2") == 0
    for split in ("validation", "test"):  # ranks share the windows of a validation, and one of them scores
        one, both = (losses(tmp_path / "runs" / name, split) for name in ("one", "two"))
        assert both == pytest.approx(one, abs=1e-5) and len(both) == 4


LEAKS = '''
"""A softmax over every key, later ones too."""
import torch
from softattn_lm.attention import AttentionKernel


class Leaks(AttentionKernel):
    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        return torch.softmax(scale * q @ k.transpose(-2, -1), -1)
'''


def test_an_arm_that_reads_the_future_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS, encoding="utf-8")
    assert ablate(tmp_path, f"attention=formula,{tmp_path / 'leaks.py'}:Leaks", "seeds=2", "name=q", "steps=2") == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "arm Leaks cannot be measured: it reads the future: with other tokens behind position 0" in said
    assert "nothing was trained" in said and not losses(tmp_path / "runs" / "q")
    typed = f"attention=formula,sdpa,{tmp_path / 'leaks.py'}:Leaks"
    assert ablate(tmp_path, typed, "seeds=2", "name=q2", "steps=2", "slots=2") == 1
    assert "arm Leaks is left out" in " ".join(capfd.readouterr().out.split())
    assert {run.split("/")[1] for run in losses(tmp_path / "runs" / "q2")} == {"formula", "sdpa"}
