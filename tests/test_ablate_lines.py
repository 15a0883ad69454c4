"""What stands beside the arms of a text for scale: an n-gram and one run of the uniform kernel, in no comparison."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softattn_lm.ablation import journal
from softattn_lm.ablation.jobs import Configs, Job
from softattn_lm.ablation.lines import lines_file, no_reference
from softattn_lm.ablation.plan import Plan, agreed
from softattn_lm.ablation.report import write
from softattn_lm.ablation.sentences import command
from softattn_lm.ablation.stages import Stages
from softattn_lm.commands import measure_lines
from softattn_lm.commands.ablate_printed import printed
from softattn_lm.commands.measure_lines import write_lines
from softattn_lm.errors import UserError
from softattn_lm.evaluation.ngram import ngram_losses
from softattn_lm.runs.files import write_json
from softattn_lm.training.prepared import prepared_data
from tests.forged import LEVEL, WINDOWS, diverged, forge, plan_of, write_run
from tests.test_ablate_plan import composed, make, parabola, tuned
from tests.test_ablate_plan import forge as forge_run
from tests.tiny_run import tiny_config

TEXT: dict[str, Any] = {"fingerprint": "cafe", "text": True, "refused": None}
LOSSES = {"validation": {"5-gram": 2.39}, "test": {"5-gram": 2.4}}


def counted(folder: Path, size: str | None = None, **said: Any) -> None:
    lines_file(folder, size).parent.mkdir(exist_ok=True, parents=True)
    write_json(lines_file(folder, size), TEXT | LOSSES | said)


def stages(plan: Plan, folder: Path) -> Stages:
    return Stages(plan, folder, Configs(plan, composed))


def references(jobs: list[Job]) -> list[str]:
    return [job.path for job in jobs if job.stage == "reference"]


def test_the_reference_runs_last_at_the_rate_of_the_baseline_and_once(tmp_path: Path) -> None:
    counted(tmp_path)
    plan = make({"tune": "lr", "seeds": [3, 4]})
    assert not references(stages(plan, tmp_path).needed()) and references(stages(plan, tmp_path).known())
    jobs = tuned(tmp_path, plan, parabola({"a": 1.2e-3, "b": 0.7e-3})).needed()
    assert jobs[-1] == Job("reference", "uniform", 3, 1.2e-3) and jobs[-1].path == "reference/uniform/seed-3"
    assert len(jobs) == 5 and len(stages(plan, tmp_path).known()) == 2 * 15 + 5
    forge_run(tmp_path, jobs[-1], 2.5)
    assert [job.stage for job in stages(plan, tmp_path).needed()] == ["report"] * 4


def test_its_settings_are_the_baselines_with_another_kernel(tmp_path: Path) -> None:
    arms = {"a": ["attention=custom", "attention.target=x.py:Mine", "scale=learned"], "b": ["scale=none"]}
    plan = make({"arms": arms, "base": ["steps=7"]})
    cfg = Configs(plan, composed).of_job(Job("reference", "uniform", 0, 1e-3), "runs")
    assert cfg["model"]["words"] == ["model=plain", "logger=wandb", "steps=7", "scale=learned", "attention=uniform",
                                     "lr=0.001"]  # fmt: skip
    assert cfg["training"]["score"] == ["validation", "test"] and cfg["ablation"]["stage"] == "reference"


@pytest.mark.parametrize(
    ("said", "counts", "why"),
    [
        ({"lines": False}, {}, ""),
        ({}, {"text": False}, ""),
        ({}, {"refused": "attention=uniform adds no bias"}, "attention=uniform adds no bias"),
        ({"arms": {"a": [], "b": ["attention=uniform"]}}, {}, "arm b has it"),
        ({"base": ["attention=uniform"], "arms": {"a": [], "b": ["attention=sdpa"]}}, {}, "arm a has it"),
    ],
)
def test_there_is_no_reference_where_nobody_asks_or_none_can_be(
    tmp_path: Path, said: dict[str, Any], counts: dict[str, Any], why: str
) -> None:
    counted(tmp_path, **counts)
    plan = make(said)
    assert no_reference(plan, tmp_path, None) == why and not references(stages(plan, tmp_path).known())
    assert no_reference(make(), tmp_path / "unmeasured", None) == ""


def test_on_a_ladder_it_runs_once_at_every_size_that_it_can_be_built_at(tmp_path: Path) -> None:
    plan = make({"ladder": ["nano", "micro", "small"]})
    counted(tmp_path, "nano")
    counted(tmp_path, "micro", refused="attention=uniform adds no bias")
    counted(tmp_path, "small")
    paths = [f"reference/{size}/uniform/seed-0" for size in ("nano", "small")]
    assert references(stages(plan, tmp_path).known()) == references(stages(plan, tmp_path).needed()) == paths


def test_lines_on_a_ladder_stand_beside_the_arms_of_their_own_size(tmp_path: Path) -> None:
    """Those of the first size stood alone in the table, and a difference at another size had no scale."""
    plan = plan_of(EFFECTS, range(3), ladder=["nano", "micro", "small"])
    for number, size in enumerate(plan.sizes):
        assert size is not None
        forge(tmp_path, EFFECTS, plan=plan, size=size, seed=number)
        if size != "small":
            counted(tmp_path, size, test={"5-gram": 2.4 + number})
            losses = np.full(WINDOWS, LEVEL + 0.5 + number)
            write_run(tmp_path, plan, "uniform", 0, losses, size=size, stage="reference")
    report = write(tmp_path)
    base = [float(np.mean(list(each.values["sdpa"].values()))) for each in report.judged]
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["verdict"] == "for scale"]
    assert [(row["arm"], row["size"], row["loss, nats"], row["difference, nats"]) for row in rows] == [
        ("5-gram", "nano", "2.4000", f"{2.4 - base[0]:+.4f}"),
        ("uniform", "nano", "2.5000", f"{2.5 - base[0]:+.4f}"),
        ("5-gram", "micro", "3.4000", f"{3.4 - base[1]:+.4f}"),
        ("uniform", "micro", "3.5000", f"{3.5 - base[1]:+.4f}"),
    ]
    text = (tmp_path / "report.md").read_text()
    assert "one run at nano, micro each, in no comparison" in text
    captions = [line for line in text.splitlines() if "Validation loss while training at" in line]
    assert ["Across, for scale" in line for line in captions] == [True, True, False]


def test_its_command_is_printed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counted(tmp_path)
    plan = make()
    assert printed(plan, tmp_path, Configs(plan, composed), [], {}, sys.stdout).left == 5
    assert f" train resume={tmp_path}/reference/uniform/seed-0" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "reference" / "uniform" / "seed-0" / "config.yaml").is_file()


def test_lines_may_be_asked_for_and_left_out_later_and_nothing_else_changes() -> None:
    plan, events = agreed(make({"lines": False}), make())
    assert plan.lines and not events
    plan, events = agreed(make(), make({"lines": False}))
    assert not plan.lines and not events
    assert "lines=false" in command(plan, Path("x"), 5) and "lines" not in command(make(), Path("x"), 5)
    with pytest.raises(UserError, match="lines=2: lines must be one of True, False"):
        make({"lines": 2})


def asked(file: Path, uniform: dict[str, Any], *known: Path) -> dict[str, Any]:
    files = [str(each) for each in known]
    return {"out": str(file), "words": ["steps=3"], "uniform": uniform, "refused": None, "counted": files}


def test_an_n_gram_is_counted_on_the_windows_that_models_are_scored_on(tmp_path: Path) -> None:
    cfg = tiny_config(tmp_path, "data.test_fraction=0.1")
    write_lines(cfg, asked(tmp_path / "lines.json", tiny_config(tmp_path, "attention=uniform")))
    found = json.loads((tmp_path / "lines.json").read_text())
    prepared = prepared_data(cfg)
    assert found["fingerprint"] == prepared.fingerprint and found["text"] and found["refused"] is None
    tokens = {name: split.tokens for name, split in prepared.splits.items()}
    vocab_size, context = prepared.tokenizer.vocab_size, cfg["model"]["context"]
    losses = {name: ngram_losses(tokens["train"], tokens[name], vocab_size, context) for name in ("validation", "test")}
    best = min(losses["validation"], key=losses["validation"].__getitem__)
    assert found["validation"] == {f"{best}-gram": losses["validation"][best]}
    assert found["test"] == {f"{best}-gram": losses["test"][best]}


def test_counts_of_another_size_are_taken_where_it_reads_the_same_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting a large text takes seconds, and a ladder measures its baseline anew as its steps are worked out."""
    cfg = tiny_config(tmp_path, "data.test_fraction=0.1")
    first, second, third = (tmp_path / f"{name}.json" for name in ("first", "second", "third"))
    write_lines(cfg, asked(first, cfg, first, second))
    counts, texts = measure_lines.counted, list[int]()
    monkeypatch.setattr(measure_lines, "counted", lambda text, n: texts.append(n) or counts(text, n))
    write_lines(tiny_config(tmp_path, "data.test_fraction=0.1", "model.d_model=32"), asked(second, cfg, first, second))
    assert not texts and json.loads(second.read_text()) == json.loads(first.read_text())
    write_lines(tiny_config(tmp_path, "data.test_fraction=0.1", "model.context=8"), asked(third, cfg, first, second))
    write_lines(tiny_config(tmp_path, "data.test_fraction=0.2"), asked(third, cfg, first, second, third))
    assert texts == [8, 16]


def test_a_baseline_that_cannot_have_the_uniform_kernel_says_why(tmp_path: Path) -> None:
    cfg = tiny_config(tmp_path, "data.test_fraction=0.1", "position=alibi")
    write_lines(cfg, asked(tmp_path / "lines.json", tiny_config(tmp_path, "position=alibi", "attention=uniform")))
    found = json.loads((tmp_path / "lines.json").read_text())
    assert "position=alibi" in found["refused"] and "\n" not in found["refused"] and found["test"]


def test_a_task_has_no_lines(tmp_path: Path) -> None:
    words = ["data=recall", "tokenizer=symbols", "data.vocab_size=32", "training.telemetry=false"]
    cfg = tiny_config(tmp_path, *words)
    write_lines(cfg, asked(tmp_path / "lines.json", cfg))
    found = json.loads((tmp_path / "lines.json").read_text())
    assert found["text"] is False and found.keys() == {"words", "fingerprint", "text"}


EFFECTS = {"sdpa": 0.0, "linear": 0.04}


def test_lines_stand_in_the_table_and_the_figures_and_change_no_verdict(tmp_path: Path) -> None:
    plan = plan_of(EFFECTS, range(5), lines=True)
    forge(tmp_path, EFFECTS, plan=plan)
    before = write(tmp_path, figures=False)
    counted(tmp_path)
    write_run(tmp_path, plan, "uniform", 0, np.full(WINDOWS, LEVEL + 0.5), stage="reference")
    report = write(tmp_path)
    assert report.said == before.said and report.warnings == before.warnings
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["sdpa", "linear", "5-gram", "uniform"]
    base = np.mean(list(report.judged[0].values["sdpa"].values()))
    for name, nats, seeds in (("5-gram", 2.4, "–"), ("uniform", 2.5, "1")):
        row = rows[name]
        assert (row["verdict"], row["seeds"], row["loss, nats"]) == ("for scale", seeds, f"{nats:.4f}")
        assert row["difference, nats"] == f"{nats - base:+.4f}" and row["p"] == row["interval"] == ""
    assert "uniform & for scale & 1 & 2.5000" in (tmp_path / "table.tex").read_text()
    text = (tmp_path / "report.md").read_text()
    assert "Across, for scale: 5-gram, uniform." in text and f"to its mean: 5-gram {2.4 - base:+.4f}" in text
    assert "uniform: the baseline with attention=uniform, one run, in no comparison" in text
    assert "reference/uniform/seed-0" in (tmp_path / "runs.csv").read_text()


def test_lines_of_another_text_or_of_nobodys_wish_are_left_out_and_a_diverged_run_is_named(tmp_path: Path) -> None:
    plan = plan_of(EFFECTS, range(2), lines=True)
    forge(tmp_path, EFFECTS, plan=plan)
    counted(tmp_path)
    run = write_run(tmp_path, plan, "uniform", 0, np.full(WINDOWS, 2.5), stage="reference")
    names = ["sdpa", "linear", "5-gram", "uniform"]
    assert [row[0] for row in write(tmp_path, figures=False).table.rows] == names
    diverged(run)
    report = write(tmp_path, figures=False)
    assert [row[0] for row in report.table.rows] == names[:3]
    assert any("reference/uniform/seed-0 diverged at step 40" in line for line in report.warnings)
    counted(tmp_path, fingerprint="beef")
    assert [row[0] for row in write(tmp_path, figures=False).table.rows] == names[:2]
    counted(tmp_path)
    Plan(**{**vars(plan), "lines": False}).write(tmp_path)
    assert [row[0] for row in write(tmp_path, figures=False).table.rows] == names[:2]
    assert len(journal.read(tmp_path, "read_test")) == 1, "lines are no reason to read the test part again"
