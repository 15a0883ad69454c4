"""The report of an ablation, on folders that were forged: what it says, writes, refuses and flags."""

import csv
import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

import softattn_lm.ablation
from softattn_lm.ablation import journal
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.report import Report
from softattn_lm.ablation.report import write as write_all
from softattn_lm.cli import main
from softattn_lm.errors import UserError
from softattn_lm.runs.files import write_json
from tests import forged
from tests.forged import LEVEL, RECALL, TUNE, WINDOWS, diverged, forge, measured, plan_of, tuned, write_run


def write(folder: Path) -> Report:
    """Without figures, which take most of the time."""
    return write_all(folder, figures=False)


EFFECTS = {"sdpa": 0.0, "linear": 0.04, "relu": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "forged"
    forge(made, EFFECTS, pair_sd=0.02, run_sd=0.001)
    return made


def verdicts(report: Report) -> dict[str, str]:
    return {c.arm: c.verdict for each in report.judged for c in each.comparisons}


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def test_verdicts_stand_first_in_plain_words_and_in_every_table(folder: Path) -> None:
    report = write_all(folder)
    assert verdicts(report) == {"linear": "worse", "relu": "equivalent"} and report.final
    linear = report.said[0]
    assert linear.startswith("linear is worse than sdpa by 0.0") and "(5 paired seeds, 98.0 % interval)" in linear
    assert "relu is equivalent to sdpa" in report.said[1] and "within ±0.01 nats" in report.said[1]
    text = (folder / "report.md").read_text()
    assert text.index("linear is worse") < text.index("## Differences")
    table = {row["arm"]: row for row in rows(folder / "table.csv")}
    assert table["linear"]["verdict"] == "worse" and table["sdpa"]["verdict"] == "baseline"
    d = float(table["linear"]["loss, nats"]) - float(table["sdpa"]["loss, nats"])
    assert float(table["linear"]["difference, nats"]) == pytest.approx(d, abs=2e-4) == pytest.approx(0.04, abs=0.01)
    tex = (folder / "table.tex").read_text()
    assert tex.count(r"\\") == 4 and r"$\pm$" in tex and tex.count("&") == 4 * (len(table["sdpa"]) - 1)
    made = {file.name for file in (folder / "figures").iterdir()}
    assert made == {f"{name}.{kind}" for name in ("differences", "curves", "positions") for kind in ("png", "svg")}


def test_runs_are_one_tidy_table(folder: Path) -> None:
    write(folder)
    frame = softattn_lm.ablation.runs(folder)
    assert len(frame) == 15 == len(rows(folder / "runs.csv")) and set(frame["end"]) == {"finished"}
    assert frame.groupby("arm")["loss_test"].mean().to_dict() == pytest.approx(
        {"sdpa": LEVEL, "linear": LEVEL + 0.04, "relu": LEVEL}, abs=0.03
    )
    scores = np.load(folder / "report" / "linear" / "seed-3" / "scores" / "test.npz")
    own = frame[(frame["arm"] == "linear") & (frame["seed"] == 3)].iloc[0]
    assert own["loss_test"] == pytest.approx(scores["nats"].sum() / scores["tokens"].sum())
    assert own["path"] == "report/linear/seed-3" and own["fingerprint"] == "cafe"


def test_while_runs_are_missing_it_says_which_and_leaves_the_test_part_alone(folder: Path) -> None:
    shutil.rmtree(folder / "report" / "linear" / "seed-3")
    for file in folder.rglob("test.npz"):
        file.write_bytes(b"must not be read")
    report = write(folder)
    assert not report.final and report.readings == 0 and not journal.read(folder, "read_test")
    text = (folder / "report.md").read_text()
    assert "Provisional" in text and "Missing: linear, seeds 3." in text and "So far, linear is worse" in text
    assert "loss_test" not in rows(folder / "runs.csv")[0]


def test_what_was_given_up_is_named_and_does_not_hold_up_the_rest(folder: Path) -> None:
    shutil.rmtree(folder / "report" / "linear" / "seed-3")
    journal.append(folder, "started", process=1)
    journal.append(folder, "failed", run="report/linear/seed-3", arm="linear", reason="out of memory")
    report = write(folder)
    assert report.final and "linear has no result for seeds 3: out of memory" in report.warnings
    assert {c.arm: len(c.seeds) for c in report.judged[0].comparisons} == {"linear": 4, "relu": 5}
    journal.append(folder, "started", process=2)
    assert not write(folder).final, "started again, it may still come"


def test_reading_the_test_part_is_counted_once_per_set_of_seeds(folder: Path) -> None:
    assert [write(folder).readings, write(folder).readings] == [1, 1]
    plan = Plan.read(folder)
    wider = Plan(**{**plan.__dict__, "seeds": [*range(7)]})
    wider.write(folder)
    journal.append(folder, "added_seeds", seeds=[5, 6])
    between = write(folder)
    assert between.judged[0].look.number == 1 and between.judged[0].look.seeds == (0, 1, 2, 3, 4)
    for arm, effect in EFFECTS.items():
        for seed in (5, 6):
            write_run(folder, wider, arm, seed, np.full(WINDOWS, LEVEL + effect + 0.001 * seed))
    after = write(folder)
    assert after.readings == 2 and after.judged[0].look.number == 2
    assert [row["look"] for row in journal.read(folder, "read_test")] == [1, 2]
    alphas = [report.judged[0].comparisons[0].alpha for report in (between, after)]
    assert alphas == pytest.approx([0.04 / 2, 0.005 / 2])
    assert "seeds added later (look 2): 5, 6" in (folder / "report.md").read_text()


def test_an_undetermined_verdict_says_what_to_type(tmp_path: Path) -> None:
    forge(tmp_path / "x", {"sdpa": 0.0, "linear": 0.004}, pair_sd=0.0, run_sd=0.015, seed=3)
    report = write(tmp_path / "x")
    assert verdicts(report) == {"linear": "undetermined"}
    more = report.judged[0].comparisons[0].more_seeds
    text = (tmp_path / "x" / "report.md").read_text()
    assert more is not None and f"{more} more seeds, about {more * 2} minutes here, would find" in text
    assert f"softattn ablate attention=sdpa,linear steps=100 seeds={5 + more} name=x runs={tmp_path}" in text


def test_a_page_runs_nothing_and_loads_nothing(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script> & $x$ | `y` <img src=http://x>"
    plan = plan_of(EFFECTS, range(3), question=nasty, hypothesis=nasty, tune=TUNE)
    forge(tmp_path, EFFECTS, plan=plan)
    tuned(tmp_path, plan, dict.fromkeys(EFFECTS, 0.001))
    write_all(tmp_path)

    class Page(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: list[str] = []
            self.links: list[str] = []
            self.text = ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)
            self.links += [value or "" for name, value in attrs if name in ("src", "href")]

        def handle_data(self, data: str) -> None:
            self.text += data

    page = Page()
    page.feed((tmp_path / "report.html").read_text())
    assert "script" not in page.tags and page.tags.count("img") == 4 and nasty in page.text
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    # Between fences stands what to type, letter by letter, and markdown reads no HTML there.
    assert "<script" not in re.sub(r"(?s)^```\n.*?^```$", "", (tmp_path / "report.md").read_text(), flags=re.M)


def test_a_moved_folder_gives_the_same_files_to_the_last_byte(folder: Path, tmp_path: Path) -> None:
    write_all(folder)
    names = ["table.csv", "table.tex", "runs.csv", "report.md", "report.html", "figures/differences.svg"]
    before = {name: (folder / name).read_bytes() for name in names}
    other = shutil.move(folder, tmp_path / "elsewhere")
    write_all(Path(other))
    assert {name: (Path(other) / name).read_bytes() for name in names} == before


def _change(run: Path, key: str, value: object) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {key: value}))


def _other_data(folder: Path) -> None:
    file = folder / "report" / "linear" / "seed-3" / "summary.json"
    write_json(file, json.loads(file.read_text()) | {"fingerprint": "beef"})


def _other_windows(folder: Path) -> None:
    file = folder / "report" / "linear" / "seed-3" / "scores" / "test.npz"
    np.savez(file, **{**np.load(file), "tokens": np.full(WINDOWS, 7.0)})


def _no_scores(folder: Path) -> None:
    (folder / "report" / "linear" / "seed-3" / "scores" / "test.npz").unlink()


def _torn_scores(folder: Path) -> None:
    (folder / "report" / "linear" / "seed-3" / "scores" / "test.npz").write_bytes(b"PK torn")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_other_data, "report/linear/seed-3 has other data than"),
        (_other_windows, "report/linear/seed-3 and .* different windows"),
        (_no_scores, "report/linear/seed-3 has finished and has no scores/test.npz"),
        (_torn_scores, "seed-3/scores/test.npz is damaged: .*; remove .*seed-3/summary.json and type softattn train"),
        (lambda f: (f / "report" / "linear" / "seed-3" / "summary.json").write_text('{"state": "fin'),
         "seed-3/summary.json is damaged: .*; remove .*seed-3/summary.json and type softattn train resume=.*seed-3"),
        (lambda f: _change(f / "report" / "linear" / "seed-3", "steps", 200), "linear/seed-3 has another steps"),
        (lambda f: _change(f / "report" / "linear" / "seed-3", "lr", 0.5), "linear/seed-3 has another lr"),
        (lambda f: [_change(f / "report" / "linear" / f"seed-{s}", "steps", 50) for s in range(5)],
         "report/relu/seed-0 has another end of its schedule than report/linear/seed-0"),
        (lambda f: (f / "report" / "linear" / "seed-3").rename(f / "report" / "linear" / "seed-9"), "holds seed 3"),
        (lambda f: (f / "report" / "linear" / "seed-3").rename(f / "report" / "relu" / "seed-9"), "holds a run of"),
        (lambda f: _change(f / "report" / "linear" / "seed-3", "ablation", None), "is no run of an ablation"),
        (lambda f: (f / "plan.json").write_text("{"), "plan.json is damaged"),
        (lambda f: shutil.rmtree(f / "report"), "has no runs yet"),
        (lambda f: (f / "plan.json").unlink(), "is no ablation: it has no plan.json"),
    ],
)  # fmt: skip
def test_what_belongs_in_no_table_is_refused_by_name(folder: Path, fault: object, said: str) -> None:
    assert callable(fault)
    fault(folder)
    with pytest.raises(UserError, match=said) as refused:
        write(folder)
    assert "\n" not in str(refused.value) and not (folder / "report.md").exists()


def test_what_is_no_folder_of_an_ablation_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for word, said in (("empty", "is empty and no ablation"), ("file", "is no folder"), ("none", "is no folder")):
        with pytest.raises(SystemExit) as stop:
            main("report", [str(tmp_path / word)])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and said in error and error.count("\n") == 1


def test_diverged_runs_are_counted_named_and_leave_no_mean(folder: Path) -> None:
    for seed in (1, 3):
        diverged(folder / "report" / "linear" / f"seed-{seed}")
    report = write(folder)
    (linear, _) = report.judged[0].comparisons
    assert linear.diverged == 2 and linear.interval is None and "2 of its 5 runs diverged" in report.said[0]
    assert any("report/linear/seed-3 diverged at step 40" in line for line in report.warnings)
    table = {row["arm"]: row for row in rows(folder / "table.csv")}
    assert table["linear"]["loss, nats"] == "2 diverged"


def test_identical_runs_and_strangers_are_flagged_by_name(tmp_path: Path) -> None:
    plan = plan_of({"sdpa": 0, "twin": 0}, range(3))
    forge(tmp_path, {"sdpa": 0, "twin": 0}, plan=plan)
    for seed in range(3):
        shutil.rmtree(tmp_path / "report" / "twin" / f"seed-{seed}")
        for arm in ("twin", *(["sdpa"] if seed else [])):
            shutil.rmtree(tmp_path / "report" / arm / f"seed-{seed}", ignore_errors=True)
            write_run(tmp_path, plan, arm, seed, np.full(WINDOWS, 2.0))
    shutil.rmtree(tmp_path / "report" / "sdpa" / "seed-0")
    write_run(tmp_path, plan, "sdpa", 0, np.full(WINDOWS, 2.0))
    write_run(tmp_path, plan, "stranger", 0, np.full(WINDOWS, 2.0))
    report = write(tmp_path)
    assert report.said == ["twin is identical to sdpa: the difference is 0 to the last digit on all seeds."]
    assert any("report/sdpa/seed-0 and report/sdpa/seed-1 have the same loss" in line for line in report.warnings)
    assert any("report/stranger/seed-0 is of no arm or seed that was planned" in line for line in report.warnings)


def test_two_seeds_are_enough_for_an_interval_and_few(tmp_path: Path) -> None:
    forge(tmp_path, {"sdpa": 0.0, "linear": 0.5}, range(2), run_sd=0.0005)
    report = write(tmp_path)
    assert len(report.judged[0].comparisons[0].seeds) == 2
    said = [line for line in report.warnings if "2 paired seeds are few" in line]
    assert len(said) == 1 and "one degree of freedom" in said[0]


def test_a_logger_that_was_typed_stands_in_the_report(tmp_path: Path) -> None:
    """It said logger=wandb of runs that were told to nobody."""
    plan = plan_of(EFFECTS, range(3), execution=["logger=none"])
    forge(tmp_path, EFFECTS, plan=plan)
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "logger=none" in text and "logger=wandb" not in text


@pytest.mark.parametrize("seeds", [2, 5])
def test_arms_that_differ_by_rounding_are_equivalent(tmp_path: Path, seeds: int) -> None:
    """The same kernel by another order of sums differed by -9.1e-10 on both seeds: undetermined, for ever."""
    effects = {"sdpa": 0.0, "formula": -9.1e-10}
    forge(tmp_path, effects, range(seeds), run_sd=0.0)
    report = write(tmp_path)
    assert verdicts(report) == {"formula": "equivalent"}
    assert any("no seed differs by more than" in line and "float32" in line for line in report.warnings)
    assert not any("seeds are few" in line for line in report.warnings)


def test_where_seeds_do_not_help_the_report_says_what_blurs_and_what_would(tmp_path: Path) -> None:
    """It said that 1.0 % of the variance was that of the test text."""
    plan = plan_of({"sdpa": 0.0, "linear": 0.0}, range(5), smallest=0.0001)
    forge(tmp_path, {"sdpa": 0.0, "linear": 0.0}, plan=plan)
    write(tmp_path)
    said = re.search(
        r"with 4096 of them, the test text would still blur it so far that (\S+) nats is the smallest "
        r"difference found, and 0.0001 matter; a larger test part",
        (tmp_path / "report.md").read_text(),
    )
    assert said is not None and 0.001 < float(said[1]) < 0.01  # three standard errors of 0.02·√(2/5)/√64


@pytest.mark.parametrize("count", [1, 3])
def test_a_test_part_of_few_windows_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Blocks of two do not fit twice into three windows, and a single window has no neighbours: both were traces."""
    monkeypatch.setattr(forged, "WINDOWS", count)
    forge(tmp_path, {"sdpa": 0.0, "linear": 0.5}, range(5), run_sd=0.001)
    assert verdicts(write(tmp_path)) == {"linear": "worse"}


def test_a_constant_difference_beyond_rounding_stays_undetermined(tmp_path: Path) -> None:
    plan = plan_of({"sdpa": 0.0, "other": 0.0}, range(3))
    forge(tmp_path, {"sdpa": 0.0, "other": 0.0}, plan=plan)
    for arm, loss in (("sdpa", 2.0), ("other", 2.0 + 2.0**-18)):
        for seed in range(3):
            shutil.rmtree(tmp_path / "report" / arm / f"seed-{seed}")
            write_run(tmp_path, plan, arm, seed, np.full(WINDOWS, loss))
    report = write(tmp_path)
    assert verdicts(report) == {"other": "undetermined"} and "the seeds changed nothing" in report.said[0]


def test_a_task_counts_what_was_solved_and_when(tmp_path: Path) -> None:
    effects = {"separate": 0.001, "shared_qk": 0.66}
    forge(tmp_path, effects, range(6), plan=plan_of(effects, range(6), metric=RECALL, smallest=0.05), run_sd=0.004,
          pair_sd=0.001)  # fmt: skip
    report = write(tmp_path)
    assert report.said[0].startswith("shared_qk is worse than separate by 6") and "points" in report.said[0]
    solved = report.judged[0].successes
    assert (solved["separate"].solved, solved["shared_qk"].solved) == (6, 0)
    assert solved["shared_qk"].high == pytest.approx(1 - 0.025 ** (1 / 6))
    assert solved["separate"].steps[0] == 60 and solved["shared_qk"].steps == (None,) * 6
    assert solved["shared_qk"].p is not None and solved["shared_qk"].p < 0.01


def test_a_task_is_told_by_number_of_pairs_and_by_gap_with_intervals_over_seeds(tmp_path: Path) -> None:
    effects = {"separate": 0.0, "raw": 0.3}
    plan = plan_of(effects, range(3), metric=RECALL, smallest=0.05)
    plan.write(tmp_path)
    accuracies = {"separate": (1.0, 1.0, 1.0), "raw": (0.68, 0.70, 0.72)}
    for arm, of in accuracies.items():
        for seed, accuracy in enumerate(of):
            write_run(tmp_path, plan, arm, seed, np.full(WINDOWS, 1 - accuracy))
    report = write_all(tmp_path)
    (judged,) = report.judged
    half = 4.302652729911275 * 0.02 / np.sqrt(3)  # t at 97.5 % with 2 degrees of freedom, sd 0.02
    for number in ("4", "8"):
        assert judged.shares["pairs"]["raw"][number] == pytest.approx((0.7, half))
        assert judged.shares["pairs"]["separate"][number] == (1.0, 0.0)
    # 30 of 100 answers are wrong, all of them among the farther 50.
    gaps = judged.shares["gap"]["raw"]
    assert gaps["1"] == gaps["2-3"] == (1.0, 0.0) and gaps["8-15"] == pytest.approx((0.4, 2 * half))
    text = (tmp_path / "report.md").read_text()
    assert "## Accuracy by number of pairs and by gap" in text and "| arm | 4 pairs | 8 pairs |" in text
    assert f"| raw | 100.00 ± 0.00 | 100.00 ± 0.00 | 40.00 ± {200 * half:.2f} |" in text
    page = (tmp_path / "report.html").read_text()
    assert "<th>gap 8-15</th>" in page and "Accuracy by number of pairs and by gap: mean over seeds" in page
    assert (tmp_path / "figures" / "shares.svg").is_file()


def test_what_diverged_is_named_below_accuracies_and_one_bin_is_no_table(tmp_path: Path) -> None:
    effects = {"separate": 0.0, "raw": 0.3}
    forge(tmp_path, effects, range(3), plan=plan_of(effects, range(3), metric=RECALL, smallest=0.05))
    diverged(tmp_path / "report" / "raw" / "seed-1")
    for file in tmp_path.rglob("test.npz"):
        np.savez(file, **{**np.load(file), "pairs": np.full(WINDOWS, 4)})
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Without the runs that diverged: raw." in text and "gap 8-15" in text and "4 pairs" not in text


def test_a_ladder_says_whether_a_verdict_holds_at_every_size(tmp_path: Path) -> None:
    effects = {"sdpa": 0.0, "linear": 0.05}
    plan = plan_of(effects, range(5), ladder=["nano", "micro"])
    for number, size in enumerate(("nano", "micro")):
        forge(tmp_path, {"sdpa": 0.0, "linear": 0.05 * (1 - number)}, plan=plan, size=size, run_sd=0.0005, seed=number)
    report = write_all(tmp_path)
    assert [c.verdict for each in report.judged for c in each.comparisons] == ["worse", "equivalent"]
    text = (tmp_path / "report.md").read_text()
    assert "the verdict does not hold at every size: worse at nano, equivalent at micro" in text
    assert {round(c.alpha, 9) for each in report.judged for c in each.comparisons} == {0.04 / 2}
    assert (tmp_path / "figures" / "ladder.svg").is_file()


def test_rates_costs_and_edits_are_told(tmp_path: Path) -> None:
    plan = plan_of(EFFECTS, range(5), tune=TUNE)
    forge(tmp_path, EFFECTS, plan=plan)
    tuned(tmp_path, plan, {"sdpa": 0.001, "linear": 0.0005, "relu": 0.0004})
    measured(tmp_path, plan, {"sdpa": 9000, "linear": 9000, "relu": 9900})
    journal.append(tmp_path, "edited", sha256="x", changes={"smallest": [0.01, 0.5]})
    (tmp_path / "measured" / "lines.json").write_text(
        json.dumps({"fingerprint": "cafe", "test": {"3-gram": 2.3}, "validation": {"3-gram": 2.2}})
    )
    report = write(tmp_path)
    assert "relu has +10.0% parameters without embeddings against sdpa" in report.warnings
    assert any("edited after its first run and not followed: smallest from 0.01 to 0.5" in w for w in report.warnings)
    assert report.judged[0].comparisons[0].rates > 0
    text = (tmp_path / "report.md").read_text()
    assert "| 3-gram |" in text and "## Learning rates" in text and "tuning seeds, which report nothing: 1000" in text


@pytest.mark.slow
def test_the_report_is_a_wandb_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.wandb_files import exit_code, records

    monkeypatch.setenv("WANDB_MODE", "offline")
    forge(tmp_path, {"sdpa": 0.0, "linear": 0.04}, range(3), logger="wandb")
    with pytest.raises(SystemExit) as stop:
        main("report", [str(tmp_path)])
    assert stop.value.code == 0
    assert "linear is" in capsys.readouterr().out
    deadline = time.monotonic() + 30  # wandb's own process may still be writing
    while exit_code(tmp_path) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert exit_code(tmp_path) == 0
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    (begun,) = [r.run for r in records(file) if r.WhichOneof("record_type") == "run"]
    assert (begun.job_type, begun.run_group) == ("report", tmp_path.name) and "table" in begun.tags
    logged = {item.key or ".".join(item.nested_key) for r in records(file) for item in r.history.item}
    assert {"differences", "figures/differences", "figures/curves"} <= {key.partition(".")[0] for key in logged}
