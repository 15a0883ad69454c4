"""From the folder of an ablation to its report, which needs nothing but that folder.

    report.md  report.html     the same text; the page holds its figures, loads nothing and runs nothing
    table.csv  table.tex       the table of differences
    runs.csv                   one row per run
    figures/*.png  *.svg

While runs are still to end it says so, reads the validation part only and decides nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from softattn_lm.ablation import html, journal, sections, sentences, tables
from softattn_lm.ablation.figures import draw_all
from softattn_lm.ablation.figures.drawn import named
from softattn_lm.ablation.frame import Run, read_runs, require_ablation, tidy
from softattn_lm.ablation.judge import Judged, judge
from softattn_lm.ablation.lines import WORD, Line, no_reference, read_lines
from softattn_lm.ablation.looks import batches, note_reading, readings
from softattn_lm.ablation.mixtures import oddities, require_one_table
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.question import together
from softattn_lm.ablation.statistics import level_of_look
from softattn_lm.ablation.tables import Block, Bullets, Heading, Picture, Table, Typed, Words
from softattn_lm.errors import UserError
from softattn_lm.runs.files import replace_text


@dataclass(frozen=True)
class Report:
    """said: the verdicts in plain words; files: what was written."""

    folder: Path
    plan: Plan
    judged: list[Judged]
    said: list[str]
    warnings: list[str]
    table: Table
    pictures: list[Picture]
    readings: int

    @property
    def final(self) -> bool:
        return all(each.look.final for each in self.judged)


def write(folder: Path, figures: bool = True) -> Report:
    """Raises UserError for a folder that is no ablation, and for runs that do not belong in one table."""
    plan = Plan.read(require_ablation(folder))
    runs = read_runs(folder)
    if not runs:
        raise UserError(f"{folder} has no runs yet; softattn ablate starts them")
    known = [run for run in runs if run.stage == "report" and run.arm in plan.arms and run.seed in plan.seeds]
    for size in plan.sizes:
        require_one_table(plan, [run for run in known if run.size == size])
    judged = judge(plan, folder, runs)
    for each in judged:
        if each.look.final and each.split == "test":
            note_reading(folder, each.size, each.look, list(plan.arms))
    lines = [line for size in plan.sizes for line in _lines(plan, folder, runs, size)]
    table = sections.differences(plan, judged, lines)
    pictures = draw_all(plan, judged, runs, folder / "figures", lines) if figures else []
    said = [sentences.sentence(plan, each, c) for each in judged for c in each.comparisons]
    warnings = _warnings(plan, folder, judged, runs)
    report = Report(folder, plan, judged, said, warnings, table, pictures, readings(folder))
    blocks = _blocks(report, runs)
    replace_text(folder / "report.md", tables.markdown(blocks))
    replace_text(folder / "report.html", html.page(plan.question or plan.name, blocks, folder / "figures"))
    replace_text(folder / "table.csv", tables.as_csv(table.head, table.rows))
    replace_text(folder / "table.tex", tables.as_tex(table))
    replace_text(folder / "runs.csv", _runs_csv(runs, report.final))
    return report


def _runs_csv(runs: Sequence[Run], test: bool) -> str:
    rows = tidy(list(runs), test)
    return tables.as_csv(list(rows[0]), [list(row.values()) for row in rows])


def _lines(plan: Plan, folder: Path, runs: Sequence[Run], size: str | None) -> list[Line]:
    """What else has a loss on the text of the reported runs of a size, as far as it was worked out."""
    own = [run for run in runs if run.size == size]
    known = {run.summary.get("fingerprint") for run in own if run.stage == "report"}
    found = read_lines(folder, size)
    if not plan.lines or plan.metric.name != "loss" or found.get("fingerprint") not in known:
        return []
    parts = [found.get(split) or {} for split in ("validation", "test")]
    lines = [Line(name, parts[0][name], parts[1][name], 0, size) for name in parts[0] if name in parts[1]]
    if no_reference(plan, folder, size) is not None:
        return lines
    for run in own:
        if run.stage == "reference" and run.end == "finished" and run.summary.get("fingerprint") in known:
            validation, test = (float(run.summary["scores"][split]["loss"]) for split in ("validation", "test"))
            lines.append(Line(run.arm, validation, test, 1, size))
    return lines


def _warnings(plan: Plan, folder: Path, judged: Sequence[Judged], runs: Sequence[Run]) -> list[str]:
    said = []
    for each in judged:
        at = sentences.at(each.size)
        for arm, seeds in each.look.lost.items():
            errors = {r.error or r.state for r in runs if (r.arm, r.size) == (arm, each.size) and r.seed in seeds}
            failed = {row["reason"] for row in journal.read(folder, "failed") if row["arm"] == arm}
            why = "; ".join(sorted(str(e) for e in (errors - {None}) or failed)) or "it was not trained"
            said.append(f"{arm}{at} has no result for seeds {_list(seeds)}: {why}")
        for c in each.comparisons:
            said += [f"{c.arm}{at}: {note}" for note in c.notes]
            if len(c.seeds) == 2 and c.interval is not None and c.detectable != 0:
                said.append(
                    f"{c.arm}{at}: 2 paired seeds are few: their one degree of freedom hardly tells how far chance "
                    "alone goes; 5 or more are worth their minutes"
                )
            elif c.more_seeds is None and len(c.seeds) < 5 and c.detectable != 0:
                said.append(f"{c.arm}{at}: {len(c.seeds)} paired seeds are few; 5 or more are worth their minutes")
        too_early = [a for a in plan.arms if a != plan.baseline and a not in {c.arm for c in each.comparisons}]
        said += [f"{arm}{at} shares fewer than 2 seeds with {plan.baseline}: no interval" for arm in too_early]
        said += [f"{note}{at}" for note in each.notes]
        _, unlike = sections.costs(plan, sections.read_costs(plan, folder, each.size))
        said += [f"{line}{at}" for line in unlike]
    reported = [run for run in runs if run.stage == "report"]
    said += oddities(plan, reported, "validation")
    for run in (run for run in runs if run.stage != "tune"):
        if run.end == "diverged":
            said.append(f"{run.path} diverged at step {run.step}: {run.error}")
    for row in journal.read(folder, "edited"):
        changes = [f"{key} from {was} to {now}" for key, (was, now) in row["changes"].items()]
        said.append(f"the question was edited after its first run and not followed: {'; '.join(changes) or 'its text'}")
    file = Path(plan.question_file or "")
    if file.is_file() and plan.sha256 not in (None, hashlib.sha256(file.read_bytes()).hexdigest()):
        said.append(f"{file.name} no longer reads as it did when the first run was planned")
    return list(dict.fromkeys(said))


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _blocks(report: Report, runs: Sequence[Run]) -> list[Block]:
    plan, folder = report.plan, report.folder
    blocks: list[Block] = [Heading(plan.question or plan.name, 1)]
    if plan.hypothesis:
        blocks.append(Words(f"Expected before the first run: {plan.hypothesis}"))
    blocks += _verdicts(report)
    blocks += [Heading("Differences"), *_picture(report, "differences"), report.table, *_picture(report, "ladder")]
    for each in report.judged:
        at = sentences.at(each.size)
        solved = sections.successes(plan, each)
        blocks += [] if solved is None else [Heading(f"Solved runs{at}"), solved]
        known = sections.read_costs(plan, folder, each.size)
        vocab_size = next((cost["vocab_size"] for cost in known.values() if "vocab_size" in cost), None)
        blocks += _section(f"Training{at}", _picture(report, "curves", each.size))
        rates = sections.learning_rates(plan, each, vocab_size)
        blocks += _section(
            f"Learning rates{at}", [*([rates] if rates else []), *_picture(report, "learning_rates", each.size)]
        )
        table, _ = sections.costs(plan, known)
        blocks += _section(f"What the arms cost{at}", [table] if table else [])
        explored = sections.explored(plan, each)
        shown: list[Block] = [*([explored] if explored else []), *_picture(report, "positions", each.size)]
        blocks += _section(f"Exploratory{at}", shown)
        found_in = [found for what in ("pairs", "gap") if (found := sections.shares(each, what)) is not None]
        title = f"Accuracy by number of pairs and by gap{at}"
        blocks += _section(title, [*found_in, *_picture(report, "shares", each.size)])
    return [*blocks, *_how(report, runs)]


def _section(title: str, blocks: Sequence[Block]) -> list[Block]:
    return [Heading(title), *blocks] if blocks else []


def _picture(report: Report, stem: str, size: str | None = None) -> list[Block]:
    return [picture for picture in report.pictures if picture.name == named(stem, size)]


def _verdicts(report: Report) -> list[Block]:
    plan, blocks = report.plan, list[Block]()
    waiting = {each.size: each.look.waiting for each in report.judged if each.look.waiting}
    if not report.final:
        blocks.append(
            Words(
                "Provisional: not all runs have ended. This reads the validation part; the test part is read, and "
                "verdicts count, when all seeds that were locked at the start have ended.",
                "warning",
            )
        )
    for size, arms in waiting.items():
        missing = "; ".join(f"{arm}, seeds {_list(of)}" for arm, of in arms.items())
        blocks.append(Words(f"Missing{sentences.at(size)}: {missing}."))
    if not report.said:
        blocks.append(Words("No arm shares two seeds with the baseline yet.", "strong"))
    blocks += [Words(line if report.final else f"So far, {line}", "strong") for line in report.said]
    blocks += [Words(line) for line in sentences.on_the_ladder(plan, report.judged)]
    if report.final:
        needed = sentences.what_is_missing(plan, report.folder, report.judged)
        blocks += [Words(line) for line in needed.said]
        blocks += [] if needed.command is None else [Typed(needed.command)]
    return [*blocks, *_section("Warnings", [Bullets(report.warnings)] if report.warnings else [])]


def _how(report: Report, runs: Sequence[Run]) -> list[Block]:
    plan, folder = report.plan, report.folder
    locked, *added = batches(plan, folder)
    items = [f"seeds locked at the start: {_list(locked)}"]
    items += [f"seeds added later (look {n}): {_list(batch)}" for n, batch in enumerate(added, start=2)]
    late = [arm for row in journal.read(folder, "added_arms") for arm in row["arms"]]
    items += [f"arms added later: {', '.join(late)}"] if late else []
    if plan.tune is not None:
        items.append(f"tuning seeds, which report nothing: {_list(plan.tune.seeds)}")
    look = max(each.look.number for each in report.judged)
    if look:
        spent = level_of_look(look)
        items.append(f"look {look}: all of its comparisons together may be wrong with probability {spent:.3g}")
    times = "once" if report.readings == 1 else f"{report.readings} times"
    items.append(f"the test part was read {times} by a report" if report.readings else "the test part was not read yet")
    items.append(
        f"smallest difference that matters: {plan.smallest:g}; metric: {plan.metric.name} on {plan.metric.split}"
    )
    items.append(f"matched: {plan.match}")
    items += _reference(plan, folder)
    items += [f"arm {arm}: {' '.join(words) or 'as the base'}" for arm, words in plan.arms.items()]
    items.append(f"base: {' '.join(together(plan.base, plan.execution))}")
    ended = sum(run.end == "finished" for run in runs)
    items.append(
        f"{ended} of {len(runs)} runs that were begun have finished; only final weights of finished schedules count"
    )
    versions = sorted({commit for run in runs if (commit := _commit(run)) is not None})
    items += [f"commit: {', '.join(versions)}"] if versions else []
    return [Heading("How it was done"), Bullets(items)]


def _reference(plan: Plan, folder: Path) -> list[str]:
    """What is said of the run of the uniform kernel, or of why there is none."""
    why = {size: no_reference(plan, folder, size) for size in plan.sizes}
    sizes = [str(size) for size, reason in why.items() if reason is None]
    said = []
    if sizes:
        runs = "one run" if plan.ladder is None else f"one run at {', '.join(sizes)} each"
        said.append(f"uniform: the baseline with {WORD}, {runs}, in no comparison")
    refused = dict.fromkeys(reason for reason in why.values() if reason)
    return [*said, *(f"no run of the uniform kernel beside the arms: {reason}" for reason in refused)]


def _commit(run: Run) -> str | None:
    file = run.folder / "versions.json"
    return json.loads(file.read_text(encoding="utf-8")).get("commit") if file.is_file() else None
