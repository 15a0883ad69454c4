"""What an ablation asks, agrees on, tunes and matches: on forged runs, so that nothing is trained."""

import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softattn_lm.ablation import journal, matching, question
from softattn_lm.ablation.jobs import Configs, Job
from softattn_lm.ablation.plan import Plan, Tune, agreed
from softattn_lm.ablation.planner import Result
from softattn_lm.ablation.sentences import command
from softattn_lm.ablation.stages import Stages
from softattn_lm.cli import main
from softattn_lm.commands import ablate
from softattn_lm.commands.ablate_printed import printed
from softattn_lm.commands.ablate_progress import Progress
from softattn_lm.config.tree import choices, config_folder
from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json
from softattn_lm.runs.status import write_status

ARMS = {"a": ["scale=none"], "b": ["scale=learned"]}


def make(said: dict[str, Any] | None = None, *words: str) -> Plan:
    return question.make_plan({"arms": ARMS, "seeds": 2} | (said or {}), words, "x")


def composed(words: Any) -> dict[str, Any]:
    lr = next((float(word.partition("=")[2]) for word in words if word.startswith("lr=")), 1e-3)
    model = {"n_layer": 2, "d_model": 16, "mlp": "gelu", "bias": False, "projections": {}, "words": list(words)}
    return {"lr": lr, "model": model, "training": {}}


def forge(folder: Path, job: Job, loss: float) -> None:
    """A run folder as a finished run leaves it; an infinite loss is a run that diverged."""
    run = folder / job.path
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    if math.isinf(loss):
        write_status(run, "failed", step=1, steps=9, error="the training loss is no longer finite")
        return
    write_status(run, "finished", step=9, steps=9)
    write_json(run / "summary.json", {"scores": {name: {"loss": loss} for name in ("validation", "test")}})


def tuned(folder: Path, plan: Plan, loss: Callable[[Job], float]) -> Stages:
    """All tuning runs that are asked for, forged until none is any more."""
    stages = Stages(plan, folder, Configs(plan, composed))
    while jobs := [job for job in stages.needed() if job.stage == "tune"]:
        for job in jobs:
            forge(folder, job, loss(job))
    return stages


def parabola(best: dict[str, float]) -> Callable[[Job], float]:
    return lambda job: 2 + 0.1 * math.log2(job.lr / best[job.arm]) ** 2 + 0.001 * (job.seed - 1000)


def test_each_arm_is_reported_at_the_bottom_of_its_own_curve(tmp_path: Path) -> None:
    plan = make({"tune": "lr"})
    stages = tuned(tmp_path, plan, parabola({"a": 1.2e-3, "b": 0.7e-3}))
    jobs = stages.needed()
    assert {job.arm: job.lr for job in jobs} == {"a": 1.2e-3, "b": 0.7e-3}
    assert [(job.seed, job.arm) for job in jobs] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert not journal.read(tmp_path, "grid_extended")
    assert len(list(tmp_path.glob("tune/*/*"))) == 2 * 5 * 3


def test_a_best_rate_on_the_edge_extends_the_grid_for_every_arm(tmp_path: Path) -> None:
    plan = make({"tune": "lr"})
    stages = tuned(tmp_path, plan, parabola({"a": 1e-3, "b": 16e-3}))
    assert {job.arm: job.lr for job in stages.needed()} == pytest.approx({"a": 1e-3, "b": 16e-3}, rel=1e-3)
    rows = journal.read(tmp_path, "grid_extended")
    assert [row["side"] for row in rows] == ["high"] * len(rows) and rows[-1]["because"] == ["b"]
    tried = {arm: sorted(path.name for path in tmp_path.glob(f"tune/{arm}/*")) for arm in "ab"}
    assert tried["a"] == tried["b"] and len(tried["a"]) == 3 * len(rows[-1]["grid"])


def test_a_grid_is_extended_three_times_on_a_side_and_the_edge_is_then_told(tmp_path: Path) -> None:
    tuned(tmp_path, make({"tune": "lr"}), parabola({"a": 1e-3, "b": 1.0}))
    assert len(journal.read(tmp_path, "grid_extended")) == 3
    edges = {row["arm"]: row["edge"] for row in journal.read(tmp_path, "chosen_rate")}
    assert edges == {"a": None, "b": "high"}


def test_rates_that_diverge_are_no_candidates_and_a_choice_once_made_stays(tmp_path: Path) -> None:
    plan = make({"tune": "lr"})
    usual = parabola({"a": 1e-3, "b": 1e-3})
    stages = tuned(tmp_path, plan, lambda job: math.inf if job.arm == "b" and job.lr > 1e-3 else usual(job))
    first = {job.arm: job.lr for job in stages.needed()}
    assert first["a"] == pytest.approx(1e-3, rel=1e-3) and first["b"] <= 1e-3
    wider = Plan(**vars(plan) | {"arms": ARMS | {"c": []}})
    again = tuned(tmp_path, wider, lambda job: parabola({"a": 1e-3, "b": 1e-3, "c": 4e-3})(job))
    assert {job.arm: job.lr for job in again.needed() if job.arm != "c"} == first
    assert len(journal.read(tmp_path, "chosen_rate")) == 3


def test_an_arm_whose_tuning_failed_is_not_reported_and_holds_nobody_up(tmp_path: Path) -> None:
    plan = make({"tune": "lr"})
    stages = Stages(plan, tmp_path, Configs(plan, composed))
    for job in stages.needed():
        if job.arm == "a":
            forge(tmp_path, job, parabola({"a": 1e-3})(job))
        else:
            stages.given_up[job.path] = "its code raises"
    assert {job.arm for job in stages.needed()} == {"a"}


def test_only_a_completed_and_scored_schedule_counts(tmp_path: Path) -> None:
    plan = make()
    stages = Stages(plan, tmp_path, Configs(plan, composed))
    job = stages.needed()[0]
    forge(tmp_path, job, 2.0)
    write_status(tmp_path / job.path, "finished", step=8, steps=9)
    assert stages.outcome(job).end == "broken"
    write_status(tmp_path / job.path, "finished", step=9, steps=9)
    write_json(tmp_path / job.path / "summary.json", {"scores": {"validation": {"loss": 2.0}}})
    assert stages.outcome(job).end == "broken", "the test part was not read"
    write_json(tmp_path / job.path / "summary.json", {"scores": {n: {"loss": 2.0} for n in ("validation", "test")}})
    assert stages.outcome(job).end == "finished"


def test_printed_commands_come_to_an_end_and_what_they_left_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was said to be finished then, and no report was written."""
    plan = make()
    configs = Configs(plan, composed)
    for job in Stages(plan, tmp_path, configs).needed():
        forge(tmp_path, job, 2.0 if job.arm == "a" else math.inf)
    assert printed(plan, tmp_path, configs, [], {}, sys.stdout) == Result(finished=2, diverged=2)
    assert not capsys.readouterr().out


def test_what_was_agreed_stays_and_seeds_and_arms_come_on_top() -> None:
    planned = make()
    asked = make({"arms": ARMS | {"c": []}, "seeds": 4, "smallest": 0.5, "baseline": "b"})
    plan, events = agreed(planned, asked)
    assert plan.seeds == [0, 1, 2, 3] and list(plan.arms) == ["a", "b", "c"]
    assert (plan.smallest, plan.baseline) == (0.01, "a")
    assert [event["event"] for event in events] == ["added_arms", "added_seeds", "edited"]
    assert events[-1]["changes"] == {"baseline": ["a", "b"], "smallest": [0.01, 0.5]}
    assert agreed(planned, make())[1] == []


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = make({"tune": {"trials": 3, "factor": 3}, "ladder": ["nano", "micro"], "metric": "accuracy"})
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan and plan.tune == Tune(grid=(1 / 3, 1.0, 3.0))
    (tmp_path / "plan.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(UserError, match="no plan of format 1"):
        Plan.read(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(UserError, match=r"plan\.json is damaged: 'tune'"):
        Plan.read(tmp_path)


def test_a_question_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_bytes("question: größer?\narms: {a: [], b: []}\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"q\.yaml is no valid yaml: 'utf-8' codec can't decode"):
        question.read_question(str(tmp_path / "q.yaml"))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"tune": {"seeds": 1}}, "a choice made on fewer is a matter of luck"),
        ({"tune": {"grid": [1, 2, 8]}}, "evenly spaced"),
        ({"tune": {"grid": [1, 2, 4], "trials": 5}}, "tune.grid names the rates itself"),
        ({"tune": "lr", "seeds": [0, 1001]}, "rates are chosen on .1001., which can then report nothing"),
        ({"arms": {"a": []}}, "compares two arms"),
        ({"arms": {"a b": [], "c": []}}, "contains ' '"),
        ({"seeds": [1, 1]}, "a list of different ones"),
        ({"match": "params"}, "did you mean parameters"),
        ({"smallest": -1}, "must be a number above 0"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(said: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        make(said)


@pytest.mark.parametrize("name", choices(config_folder(), "ablation"))
def test_every_shipped_question_is_complete_and_its_arms_compose(name: str) -> None:
    from softattn_lm.commands.ablate import composed as compose

    _, said, _, _ = question.read_question(name)
    assert {"question", "hypothesis", "seeds", "smallest", "budget"} <= said.keys()
    plan = question.make_plan(said, [], name)
    configs = [Configs(plan, compose).of(arm, size) for size in plan.sizes for arm in plan.arms]
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == len(configs), "two arms are the same"


def test_words_typed_as_arms() -> None:
    arms, base = question.typed_arms(["attention=sdpa,my.py:Mine", "steps=3", "+x=[1,2]"])
    assert arms == {"sdpa": ["attention=sdpa"], "Mine": ["attention=my.py:Mine"]} and base == ["steps=3", "+x=[1,2]"]
    assert question.own_code(arms["Mine"]) == ["attention=custom", "attention.target=my.py:Mine"]
    assert list(question.typed_arms(["model.n_head=2,4"])[0]) == ["n_head_2", "n_head_4"]
    assert question.together(["steps=3", "lr=1"], ["tokens=5"], ["lr=2"]) == ["tokens=5", "lr=2"]


COST = {"steps": 100, "tokens_per_step": 10, "flops_per_token": 1000, "tokens_per_second": 50.0, "mlp_width": 64}


def costs(**arm: Any) -> matching.Costs:
    base = COST | {"parameters": 10_000, "parameters_without_embeddings": 8000}
    return {None: {"a": base, "b": base | arm}}


@pytest.mark.parametrize(
    ("how", "other", "word"),
    [
        ("parameters", {"parameters": 9_360}, "model.mlp_width=74"),  # 64 per unit of width in 2 layers of 16
        ("flops", {"flops_per_token": 500}, "steps=200"),
        ("time", {"tokens_per_second": 25.0}, "steps=50"),
        ("tokens", {"tokens_per_step": 40}, "steps=25"),
    ],
)
def test_arms_are_made_alike(how: str, other: dict[str, Any], word: str) -> None:
    plan = make({"match": how})
    assert matching.match(plan, Configs(plan, composed), costs(**other)).matched == {"": {"b": [word]}}
    assert any(abs(residual.by) > 0.3 or how == "parameters" for residual in matching.residuals(plan, costs(**other)))


def test_what_stays_unlike_by_more_than_two_percent_is_a_warning() -> None:
    said = [str(residual) for residual in matching.residuals(make(), costs(parameters=10_250, flops_per_token=1010))]
    assert said == [
        "warning: b has +2.50% parameters against the baseline", "b has +1.00% training FLOPs against the baseline"
    ]  # fmt: skip


def test_on_a_ladder_tokens_grow_with_the_parameters() -> None:
    plan = make({"ladder": ["nano", "micro"]})
    small = COST | {"parameters_without_embeddings": 1000}
    large = COST | {"parameters_without_embeddings": 5000, "tokens_per_step": 25}
    plan = matching.on_ladder(plan, {"nano": {"a": small, "b": small}, "micro": {"a": large, "b": large}})
    assert plan.matched == {"micro": {"a": ["steps=200"], "b": ["steps=200"]}}
    words = Configs(plan, composed).words("b", "micro")
    assert "model/size=micro" in words and words.index("model/size=micro") < words.index("steps=200")
    assert Job("report", "a", 0, 1e-3, "micro").path == "report/micro/a/seed-0"


@pytest.mark.parametrize(
    "typed",
    [
        ["scale=none,learned,inverse_dim", "baseline=learned", "smallest=0.0123456789", "steps=7"],
        ["scale=none,learned", "tune=lr", "name=mine", "hypothesis=it's $free; always", "metric=accuracy"],
        ["scale=none,learned", "tune=lr", "trials=7", "match=flops", "ladder=nano,micro", "seeds=[3,4]"],
        ["scale=none,learned", "budget=7.5", 'question=a, [b] = {c}: "d"?'],
        ["scale", "baseline=learned", "trials=7", "smallest=0.02", "steps=9"],
        ["scale", "metric=accuracy", "match=parameters", "ladder=nano,micro", "budget=90", "name=other"],
        ["projections", "tune=lr"],
        ["scale", "tune=none", "question=Does it?"],
    ],
    ids=" ".join,
)
def test_the_command_that_a_report_prints_asks_the_same_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str]
) -> None:
    """It left out the baseline and whatever was typed beside the name of a question."""
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[Plan, Path]] = []
    monkeypatch.setattr(ablate, "_dry_run", lambda plan, folder, *_: asked.append((plan, folder)))
    for words in (typed, None):
        if words is None:
            words = shlex.split(command(*asked[0], seeds=len(asked[0][0].seeds) + 2))[2:]
        with pytest.raises(SystemExit) as stop:
            main("ablate", [*words, "dry_run=true"])
        assert stop.value.code in (0, None)
    (first, folder), (again, there) = asked
    assert there.resolve() == folder.resolve() and len(again.seeds) == len(first.seeds) + 2
    assert agreed(first, again)[1] == [{"event": "added_seeds", "seeds": again.seeds[len(first.seeds) :]}]
    assert again.budget_minutes == first.budget_minutes


def test_no_time_is_promised_for_runs_that_wait_in_a_queue(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("report", "a", seed, 1e-3) for seed in range(2)]
    for slots, said in ((1, "0 of 2 runs done, 1 running, 2m00s left"), (None, "0 of 2 runs done, 1 submitted")):
        with Progress({(None, "a"): 60.0}, slots) as progress:
            progress.update(jobs, set(), {jobs[0].path: time.monotonic()}, {})
        assert capsys.readouterr().out.strip() == said
