"""The tables of a report: differences, successes, learning rates, costs, and what is only explored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softattn_lm.ablation.judge import Judged
from softattn_lm.ablation.lines import Line
from softattn_lm.ablation.matching import UNLIKE, measured_file, training_flops
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.sentences import Unit, p_value, percent, unit_of
from softattn_lm.ablation.statistics import BOOTSTRAP_FROM, SIGN_FLIPS_FROM
from softattn_lm.ablation.tables import Table
from softattn_lm.ablation.verdict import Comparison

NONE = "–"


def differences(plan: Plan, judged: Sequence[Judged], lines: Sequence[Line] = ()) -> Table:
    """A row per arm and size; `lines`: what else has a loss on this text."""
    unit, sized = unit_of(plan), len(judged) > 1
    value = f"{plan.metric.name}, {'%' if unit.factor == 100 else unit.name}"
    head = [
        "arm",
        *(["size"] if sized else []),
        "verdict",
        "seeds",
        value,
        "sd",
        f"difference, {unit.name}",
        "interval",
    ]
    head += ["p", "p, Holm", "p, sign flip", "BCa", "detectable", "correlation", "text", "rates"]
    empty = {index for index, name in enumerate(head) if name in ("p, sign flip", "BCa", "text", "rates")}
    rows, marks = [], []
    for each in judged:
        found = {c.arm: c for c in each.comparisons}
        for arm in [plan.baseline, *(name for name in plan.arms if name != plan.baseline)]:
            word = found[arm].verdict if arm in found else "baseline" if arm == plan.baseline else "too early"
            cells = [arm, *([str(each.size)] if sized else []), word, str(len(each.values[arm]))]
            rows.append([*cells, *_level(each.values[arm].values(), unit), *_compared(plan, found.get(arm))])
            marks.append(word)
    for each, line in ((each, line) for each in judged for line in lines if line.size == each.size):
        cells = [line.name, *([str(each.size)] if sized else []), "for scale", str(line.runs or NONE)]
        away = beside_baseline(plan, each, line)
        cells += [unit.number(line.on(each.split)), "", NONE if away is None else unit.number(away, plus=True)]
        rows.append([*cells, *[""] * (len(head) - len(cells))])
    kept = [i for i in range(len(head)) if i not in empty or any(row[i] not in (NONE, "") for row in rows)]
    n = sum(len(each.comparisons) for each in judged)
    need = "this one comparison needs" if n == 1 else f"all {n} comparisons together need"
    note = (
        "Interval: paired t over seeds, with the uncertainty of the test text and of the chosen rates where they are "
        f"known, at the level that {need}. "
        f"Sign flips from {SIGN_FLIPS_FROM} pairs on, BCa bootstrap from {BOOTSTRAP_FROM}. Detectable: the smallest "
        "true difference found with 80 % power. Text, rates: their share of the variance. Correlation: of the two arms "
        "over seeds; near 0, pairing bought nothing."
    )
    if lines:
        note += " For scale: in no comparison; the difference is to the mean of the baseline."
    return Table([head[i] for i in kept], [[row[i] for i in kept] for row in rows], note, marks)


def beside_baseline(plan: Plan, judged: Judged, line: Line) -> float | None:
    """The line's loss minus the mean of the baseline; None where that has none yet, or diverged."""
    own = list(judged.values[plan.baseline].values())
    return line.on(judged.split) - float(np.mean(own)) if own and np.isfinite(own).all() else None


def _level(values: Iterable[float], unit: Unit) -> list[str]:
    """Mean and standard deviation over seeds; of an arm that diverged a mean would flatter it."""
    own = list(values)
    lost = sum(not math.isfinite(value) for value in own)
    if lost or not own:
        return [f"{lost} diverged" if lost else NONE, NONE]
    return [unit.number(float(np.mean(own))), unit.number(float(np.std(own, ddof=1))) if len(own) > 1 else NONE]


def _compared(plan: Plan, found: Comparison | None) -> list[str]:
    unit = unit_of(plan)
    if found is None:
        return [NONE] * 10
    mean = interval = NONE
    if found.interval is not None:
        mean = unit.number(unit.sign * found.interval.mean, plus=True)
        interval = f"± {unit.number(found.interval.half)} ({percent(found.interval.level)})"
    flip = NONE if found.p_sign_flip is None else p_value(found.p_sign_flip)
    bootstrap = NONE
    if found.bootstrap is not None:
        low, high = sorted(unit.sign * end for end in found.bootstrap)
        bootstrap = f"{unit.number(low, plus=True)} … {unit.number(high, plus=True)}"
    least = NONE if found.detectable is None else unit.number(found.detectable)
    linked = NONE if found.correlation is None else f"{found.correlation:.2f}"
    shares = [f"{share:.0%}" if share >= 0.005 else NONE for share in (found.text, found.rates)]
    tests = [p_value(found.p), p_value(found.p_holm), flip, bootstrap]
    return [mean, interval, *tests, least, linked, *shares]


def successes(plan: Plan, judged: Judged) -> Table | None:
    if not judged.successes:
        return None
    head = ["arm", f"runs at {plan.metric.solved:.0%} or more", "95 % interval", "steps to it, median", "p, log-rank"]
    rows = []
    for arm, found in judged.successes.items():
        known = sorted(math.inf if steps is None else steps for steps in found.steps)
        middle = known[len(known) // 2] if known else math.inf
        interval = f"{found.low:.0%} … {found.high:.0%}"
        steps = f"{middle:,.0f}" if math.isfinite(middle) else "not reached"
        p = NONE if found.p is None else p_value(found.p)
        rows.append([arm, f"{found.solved} of {found.runs}", interval, steps, p])
    note = "Interval: Clopper and Pearson. Log-rank: of steps, against the baseline; runs that never came are censored."
    return Table(head, rows, note)


def learning_rates(plan: Plan, judged: Judged, vocab_size: int | None) -> Table | None:
    """Sensitivity: the mean over the grid of min(loss, loss at the start) − the best; the loss at the start is ln V."""
    if not judged.choices:
        return None
    rows = []
    for arm, row in judged.choices.items():
        losses = {float(rate): of for rate, of in (row.get("losses") or {}).items()}
        means = [_mean(of) for _, of in sorted(losses.items())]
        finite = [mean for mean in means if math.isfinite(mean)]
        start = math.log(vocab_size) if vocab_size else max(finite, default=math.nan)
        best = min(finite, default=math.nan)
        hurt = float(np.mean([min(mean, start) - best for mean in means])) if means else math.nan
        tried = f"{min(losses):.3g} … {max(losses):.3g} ({len(losses)})" if losses else NONE
        lost = sum(not math.isfinite(mean) for mean in means)
        rows.append([
            arm, f"{row['lr']:.3g}", tried, row["edge"] or NONE, f"{row['excess']:.4f}", f"{hurt:.4f}",
            str(lost or NONE),
        ])  # fmt: skip
    head = [
        "arm",
        "chosen lr",
        "tried (rates)",
        "on the edge",
        "choice costs, nats",
        "sensitivity, nats",
        "diverged rates",
    ]
    note = (
        "Chosen by the validation losses of the tuning seeds, which report nothing: at the vertex of a parabola, or on "
        "the edge of the grid where that lies beyond it, or the best rate tried where no parabola fits. Sensitivity: "
        "how much the mean rate of the grid loses against the best one."
    )
    return Table(head, rows, note)


def _mean(of: dict[str, float | None]) -> float:
    """A rate at which a seed diverged, which the log holds as null, has no finite one."""
    return float(np.mean([math.inf if value is None else value for value in of.values()]))


def read_costs(plan: Plan, folder: Path, size: str | None) -> dict[str, dict[str, Any]]:
    files = {arm: measured_file(folder, arm, size) for arm in plan.arms}
    return {arm: json.loads(f.read_text(encoding="utf-8")) for arm, f in files.items() if f.is_file()}


def costs(plan: Plan, known: dict[str, dict[str, Any]]) -> tuple[Table | None, list[str]]:
    """(the table, what is unlike by more than 2 %)."""
    if not known:
        return None, []
    head = [
        "arm", "parameters", "without embeddings", "steps", "FLOPs/token", "executed", "cache B/token", "state B",
        "tokens/s", "memory, MiB",
    ]  # fmt: skip
    rows = [
        [
            arm, f"{c['parameters']:,}", f"{c['parameters_without_embeddings']:,}", f"{c['steps']:,}",
            f"{c['flops_per_token']:,.0f}", f"{c['executed_flops_per_token']:,.0f}",
            f"{c['decode_bytes_per_token']:,.0f}", f"{c.get('decode_state_bytes', 0):,.0f}",
            f"{c['tokens_per_second']:,.0f}",
            f"{c['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        for arm, c in known.items()
    ]  # fmt: skip
    base = known.get(plan.baseline)
    unlike = []
    for arm, cost in known.items():
        for what, key in (("parameters without embeddings", "parameters_without_embeddings"), ("training FLOPs", None)):
            if base is not None and arm != plan.baseline:
                mine, theirs = (training_flops(c) if key is None else c[key] for c in (cost, base))
                if theirs and abs(mine / theirs - 1) > UNLIKE:
                    unlike.append(f"{arm} has {mine / theirs - 1:+.1%} {what} against {plan.baseline}")
    devices = sorted({f"{c.get('device')}, {c.get('threads')} thread(s)" for c in known.values()})
    note = (
        f"Each arm measured alone, on {'; '.join(devices)}. FLOPs: of training, by algorithm, and as torch's counter "
        "sees them executed. Cache: what decoding keeps per token over all layers, and what it keeps at any length."
    )
    return Table(head, rows, note), unlike


def explored(plan: Plan, judged: Judged) -> Table | None:
    if not judged.exploratory:
        return None
    arms = [arm for arm in plan.arms if any(arm in of for of in judged.exploratory.values())]
    rows = []
    for arm in arms:
        row = [arm]
        for of in judged.exploratory.values():
            mean, difference, half = of.get(arm, (math.nan,) * 3)
            row.append(NONE if math.isnan(mean) else f"{mean:.4f}")
            row.append(NONE if math.isnan(difference) else f"{difference:+.4f} ± {half:.4f}")
        rows.append(row)
    head = ["arm", *(cell for name in judged.exploratory for cell in (name, "difference"))]
    note = "Nats per token; each difference with its own 95 % t interval, not corrected for how many are looked at."
    return Table(head, rows, note)


def shares(judged: Judged, what: str) -> Table | None:
    """Accuracy by number of pairs or by gap, a row per arm; `what`: "pairs" or "gap"."""
    arms = judged.shares.get(what)
    if arms is None:
        return None
    bins = list(dict.fromkeys(name for of in arms.values() for name in of))
    rows = [[arm, *(_share(of[name]) if name in of else NONE for name in bins)] for arm, of in arms.items()]
    lost = [arm for arm, of in judged.values.items() if any(not math.isfinite(value) for value in of.values())]
    note = {
        "pairs": "Accuracy in %, by what a sequence asks to be kept in mind (of recall, its pairs).",
        "gap": "Accuracy in %, by how many tokens before the question the answer stands.",
    }[what]
    note += " Mean over seeds with its own 95 % t interval, not corrected for how many are looked at."
    note += f" Without the runs that diverged: {', '.join(lost)}." if lost else ""
    return Table(["arm", *(f"{name} pairs" if what == "pairs" else f"gap {name}" for name in bins)], rows, note)


def _share(found: tuple[float, float]) -> str:
    mean, half = found
    return f"{100 * mean:.2f}" + ("" if math.isnan(half) else f" ± {100 * half:.2f}")
