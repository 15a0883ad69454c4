"""What an ablation refuses before anything of it is made, and what it plans anew: nothing is trained here."""

from pathlib import Path
from typing import Any

import pytest

from softattn_lm.ablation import journal, question
from softattn_lm.ablation.answerable import require_answerable, require_opponent
from softattn_lm.ablation.jobs import Configs, Job
from softattn_lm.ablation.plan import Plan, agreed
from softattn_lm.ablation.sentences import command
from softattn_lm.commands import ablate as commands
from softattn_lm.errors import UserError
from softattn_lm.runs.status import write_status
from tests.ablation import ablate
from tests.test_ablate_plan import ARMS, forge, make


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"seeds": 0}, r"seeds=0: an interval needs 2 seeds or more"),
        ({"seeds": []}, r"seeds=\[\]: an interval needs 2 seeds or more"),
        ({"seeds": [-1, 0]}, "different ones from 0 on"),
        ({"seeds": 1000.0}, "1000.0 is a number with a point; seeds are whole numbers such as 5"),
        ({"seeds": "1e3"}, "1e3 is no number to yaml"),
        ({"seeds": [0, 1.5]}, "1.5 is a number with a point"),
        ({"smallest": 0}, "smallest=0 must be a number above 0"),
        ({"arms": {"..": [], "b": []}}, "^arm .. is empty, reserved or begins with"),
        ({"arms": {"../x": [], "b": []}}, "^arm ../x contains '/'"),
        ({"arms": {"a": ["seed=3"], "b": []}}, r"^arm a: seed=3 would have no effect, as .* type seeds=\[3,4\]"),
        ({"arms": {"a": [], "b": ["name=foo"]}}, "^arm b: name=foo would have no effect"),
        ({"arms": {"a": [], "b": ["+ablation.arm=a"]}}, "would have no effect, as ablate writes there"),
        ({"arms": {"a": ["fork=x@1"], "b": []}}, "every run begins from the initial values of its seed"),
        ({"base": ["training.score=[test]"]}, r"^base: training.score=\[test\] would have no effect"),
        ({"base": ["training.sample_every=5"]}, "runs write no samples"),
    ],
)
def test_a_value_that_would_be_passed_over_is_refused(said: dict[str, Any], error: str) -> None:
    """0 seeds were taken for none given, and a seed of an arm stood in the report and in no run."""
    with pytest.raises(UserError, match=error):
        make(said)


def test_a_typed_seed_names_the_setting_to_type_and_what_is_done_anyway_is_taken() -> None:
    with pytest.raises(UserError, match=r"^seed=3 would have no effect"):
        make({}, "seed=3")
    assert make({"base": ["training.sample_every=null"]}).base[-1] == "training.sample_every=null"


def test_values_out_of_range_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """slots=-2 was a traceback, and slots=0 as many as there are cores."""
    for typed, said in (
        ("slots=-2", "slots=-2: slots must be at least 1"),
        ("slots=0", "slots=0: slots must be at least 1"),
        ("threads=0", "threads=0: threads must be at least 1"),
        ("smallest=0", "smallest=0.0: smallest must be above 0"),
        ("seeds=0", "seeds=0: an interval needs 2 seeds"),
        ("seeds=2.5", "seeds=2.5: seeds must be a whole number"),
    ):
        assert ablate(tmp_path, "attention=sdpa,linear", typed) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_a_key_that_stands_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    """yaml takes the later: an arm was lost without a word."""
    file = tmp_path / "q.yaml"
    for text, said in (
        ("arms:\n  a: [scale=none]\n  b: []\n  b: [scale=learned]\n", "b stands in lines 3 and 4"),
        ("seeds: 3\narms: {a: [], b: []}\nseeds: 5\n", "seeds stands in lines 1 and 3"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=rf"q\.yaml is no valid yaml: {said}"):
            question.read_question(str(file))
    file.write_text("arms:\n  a: &a [scale=none]\n  b: *a\ntune: {seeds: 3}\nseeds: 5\n")
    assert question.read_question(str(file))[1]["arms"] == {"a": ["scale=none"], "b": ["scale=none"]}


def answerable(said: dict[str, Any], **data: Any) -> None:
    def composed(_: Any) -> dict[str, Any]:
        return {"data": {"_target_": "softattn_lm.data.sources.TextFiles", "val_fraction": 0.1} | data}

    plan = make(said)
    require_answerable(plan, Configs(plan, composed))


def test_data_without_a_part_to_report_on_is_refused_with_what_to_type() -> None:
    """All runs trained to their end, and failed with a setting that nobody had typed."""
    with pytest.raises(UserError, match=r"data.test_fraction=0.0 leaves no test part.*type data.test_fraction=0.1"):
        answerable({}, test_fraction=0.0)
    with pytest.raises(UserError, match=r"data.val_fraction=0.0 leaves no validation part"):
        answerable({}, val_fraction=0.0, test_fraction=0.1)
    answerable({}, test_fraction=0.1)
    answerable({}, test_fraction=0.0, test_split="test", val_fraction=None)


def test_the_accuracy_of_a_text_is_refused() -> None:
    """Every run was called diverged, as nothing of it was right or wrong."""
    with pytest.raises(UserError, match=r"metric=accuracy is of the answers of a task.* type metric=loss"):
        answerable({"metric": "accuracy"}, test_fraction=0.1)
    answerable({"metric": "accuracy"}, _target_="softattn_lm.data.tasks.recall.Recall")


def test_what_cannot_be_answered_is_told_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry in ("false", "true"):
        assert ablate(tmp_path, "attention=sdpa,linear", "data.test_fraction=0", "name=x", f"dry_run={dry}") == 2
        assert "type data.test_fraction=0.1" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "x" / "plan.json").exists()


def test_own_code_that_is_not_there_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline was trained alone, and the test part read for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('it is not run to be looked at')\nclass Mine: ...\n")
    (tmp_path / "torn.py").write_text("class Mine(:\n")
    for typed, said in (
        ("mine.py:Mien", "arm Mien: attention.target=mine.py:Mien: mine.py has no Mien; did you mean Mine?"),
        ("none.py:Mine", "there is no file"),
        ("torn.py:Mine", "torn.py, line 1: SyntaxError"),
        ("no_such_package_of_mine.kernels:Mine", "there is no module no_such_package_of_mine.kernels"),
    ):
        assert ablate(tmp_path, f"attention=sdpa,{typed}", "name=x") == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "runs" / "x").exists()


def test_a_baseline_is_not_trained_alone() -> None:
    with pytest.raises(UserError, match=r"^arm b raises; nothing is left to compare with a, and nothing was trained"):
        require_opponent(make(), {"b": "arm b raises"})
    require_opponent(make({"arms": ARMS | {"c": []}}), {"b": "it raises"})
    with pytest.raises(UserError, match="the baseline cannot be trained: it raises"):
        require_opponent(make(), {"a": "it raises"})


def test_what_runs_execute_on_is_kept_until_another_is_typed(tmp_path: Path) -> None:
    """logger=none was lost in the report and in the command for more seeds."""
    planned = make(None, "steps=7")
    planned = Plan(**vars(planned) | {"name": "x", "execution": ["logger=none", "trainer=cpu"]})
    assert "logger=none trainer=cpu seeds=" in command(planned, tmp_path / "runs" / "x", 9)
    again, events = agreed(planned, Plan(**vars(planned) | {"execution": ["logger.project=mine"]}))
    assert again.execution == ["trainer=cpu", "logger.project=mine"] and not events
    assert agreed(planned, Plan(**vars(planned) | {"execution": []}))[0].execution == planned.execution


def test_a_command_for_more_seeds_is_about_the_folder_that_is_reported(tmp_path: Path) -> None:
    """Of a copy it named the folder that it was copied from."""
    plan = Plan(**vars(make()) | {"name": "before", "question_file": None})
    assert command(plan, tmp_path / "copy", 9).endswith(f"seeds=9 name=copy runs={tmp_path}")


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a plan whose first run has failed."""
    monkeypatch.setattr(commands, "require_answerable", lambda *_: None)
    folder = tmp_path / "x"
    commands._begun(make(), folder)
    forge(folder, JOB, 2.0)
    write_status(folder / JOB.path, "failed", step=1, steps=9, error="its code raises")
    return folder


JOB = Job("report", "a", 0, 1e-3)
MENDED = {"base": ["steps=5"], "arms": {"a": ["scale=none"], "c": []}}


def test_a_question_that_was_mended_before_any_run_has_finished_is_planned_anew(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on as it was planned, to fail again, and could be mended under another name only."""
    plan = commands._begun(make(MENDED), planned)
    assert list(plan.arms) == ["a", "c"] and plan.base[-1] == "steps=5" and Plan.read(planned) == plan
    assert "planned anew" in " ".join(capsys.readouterr().out.split())
    assert [row["event"] for row in journal.read(planned)] == ["planned"]
    assert (planned / "aside" / "1" / JOB.path / "config.yaml").is_file() and not (planned / "report").exists()
    commands._begun(make({"base": ["steps=6"]}), planned)
    assert (planned / "aside" / "2" / "plan.json").is_file()


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_plan_of_which_something_came_goes_on(planned: Path, state: str) -> None:
    error = "the loss is no longer finite" if state == "diverged" else None
    write_status(planned / JOB.path, "failed" if error else "finished", step=9, steps=9, error=error)
    plan = commands._begun(make(MENDED), planned)
    assert list(plan.arms) == ["a", "b", "c"] and "steps=5" not in plan.base and not (planned / "aside").exists()


def test_more_seeds_are_no_reason_to_plan_anew(planned: Path) -> None:
    assert commands._begun(make({"seeds": 3}), planned).seeds == [0, 1, 2] and not (planned / "aside").exists()
