"""ablate: from a question to run folders and a report. The planning is in softattn_lm/ablation; here it meets Hydra,
the terminal and signals.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from softattn_lm.ablation import journal, matching, question
from softattn_lm.ablation.anew import may_be_anew, set_aside
from softattn_lm.ablation.answerable import require_answerable, require_opponent
from softattn_lm.ablation.executors.local import Local
from softattn_lm.ablation.executors.slots import Slot, graphics_processors, make_slots, use
from softattn_lm.ablation.executors.warm import Warm
from softattn_lm.ablation.forecast import measured_alone
from softattn_lm.ablation.jobs import Configs
from softattn_lm.ablation.lines import no_reference
from softattn_lm.ablation.plan import FILE, Plan, agreed
from softattn_lm.ablation.planner import Planner, Result, locked
from softattn_lm.ablation.stages import Stages
from softattn_lm.commands import COMMANDS
from softattn_lm.commands.ablate_printed import printed
from softattn_lm.commands.ablate_progress import Progress, show_dry_run
from softattn_lm.config.argv import sort
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.custom import require_there
from softattn_lm.config.raw import encode
from softattn_lm.config.settings import AblateSettings, section
from softattn_lm.config.tree import command_groups, commented_keys, config_folder
from softattn_lm.config.trust import require_trusted, trust_typed
from softattn_lm.errors import UserError
from softattn_lm.runs.names import runs_folder, valid_name
from softattn_lm.training.console import plain_console

# What a run executes on and what is written down: it may differ between two calls of the same command.
_EXECUTION = ("logger", "trainer", "training.num_workers")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run(cfg: dict[str, Any], words: list[str], typed: list[str]) -> None:
    """`typed`: settings of `train`, of which one may name the arms. Raises UserError before anything runs; SystemExit
    with 1 if a run failed, with 130 or 143 after a signal.
    """
    settings = section(AblateSettings, cfg)
    execution = [word for word in typed if _key(word).startswith(_EXECUTION)]
    others = [word for word in typed if word not in execution and _key(word) != "trust"]
    plan, said = asked(settings, words, others)
    plan = replace(plan, execution=execution)
    folder = runs_folder(settings.runs) / plan.name
    if settings.dry_run:
        if settings.save_as is not None:
            _say(f"save_as={settings.save_as}: a dry run writes nothing")
        _dry_run(plan, folder, settings)
        return
    # A shell that is given the commands is given nothing else.
    out = sys.stdout
    with redirect_stdout(sys.stderr) if settings.executor == "print" else nullcontext():
        if settings.save_as is not None:
            plan = _saved(plan, said, settings.save_as)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, _say) as lock:
            result = _work(_begun(plan, folder), folder, settings, lock, out)
        _report(folder, result)


def asked(settings: AblateSettings, words: Sequence[str], typed: list[str]) -> tuple[Plan, dict[str, Any]]:
    """The plan of what was typed, and the question as its file or the command line states it."""
    if len(words) > 1:
        raise UserError(f"ablate asks one question at a time, but {len(words)} came: {' '.join(words)}")
    arms, base = question.typed_arms(typed)
    if words and arms:
        raise UserError(f"{words[0]} names its arms itself; leave out the values after {next(iter(arms))}")
    if not words and not arms:
        raise UserError("name a question, or arms such as attention=sdpa,linear; ablate --help lists what there is")
    name, said, sha256, file = question.read_question(words[0]) if words else ("", {}, None, None)
    said = said if words else {"arms": arms}
    given = {key: getattr(settings, key) for key in question.KEYS if key not in ("arms", "base")}
    said = said | {key: value for key, value in given.items() if value is not None}
    if settings.trials is not None:
        if settings.tune == "none":
            raise UserError(f"trials={settings.trials} is of learning rates, and tune=none tries none; leave out one")
        tune = said.get("tune")
        said["tune"] = (tune if isinstance(tune, dict) else {}) | {"trials": settings.trials}
    plan = question.make_plan(said, base, name, sha256, file)
    chosen = settings.name or settings.save_as or name or question.short_name(plan)
    plan = replace(plan, name=valid_name(chosen), seeds_at_start=plan.seeds)
    _require_own_code(plan, question.own_code([*base, *(word for own in arms.values() for word in own)]))
    return plan, said


def _require_own_code(plan: Plan, typed: Sequence[str]) -> None:
    """Raises UserError for code that nobody typed or trusted, and for code that is not there."""
    trust_typed([f"{_key(word)}={encode(word.partition('=')[2])}" for word in typed])
    for owner, words in {"": plan.base, **{f"arm {arm}: ": own for arm, own in plan.arms.items()}}.items():
        for word in words:
            key, _, target = word.partition("=")
            if key == "attention.target":
                require_trusted(target)
                require_there(target, f"{owner}{word}")


def composed(words: Sequence[str]) -> dict[str, Any]:
    """The checked config of `train` for settings as they are typed."""
    command, folder = COMMANDS["train"], config_folder()
    known = {*(key for key, _, _ in commented_keys(folder / "train.yaml")), *command_groups(folder, "train")}
    return check(compose("train", sort(command, list(words), known).overrides, folder), command.settings)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _say(line: str) -> None:
    plain_console().print(line, soft_wrap=True)


def _saved(plan: Plan, said: dict[str, Any], name: str) -> Plan:
    """The plan as the yaml of that name asks for it, which is written if it is not there."""
    path = Path(f"{valid_name(name)}.yaml")
    if not path.exists():
        question.save(plan, said, path)
        _say(f"{path} asks this question again: ablate {path}")
    _, again, sha256, file = question.read_question(str(path))
    read = question.make_plan(again, [], plan.name, sha256, file)
    read = replace(read, seeds_at_start=plan.seeds, execution=plan.execution)
    if (read.arms, read.base, read.tune) != (plan.arms, plan.base, plan.tune):
        raise UserError(f"save_as={name}: {path} is there already and asks something else; choose another name")
    return read


def _begun(plan: Plan, folder: Path) -> Plan:
    """Agreed with what was planned before, if anything was; written down either way."""
    if not (folder / FILE).is_file():
        return _planned(plan, folder)
    merged, events = agreed(Plan.read(folder), plan)
    if may_be_anew(folder, events):
        require_answerable(plan, Configs(plan, composed, plan.execution))
        _say(f"no run of what was planned before has finished: planned anew, and that lies in {set_aside(folder)}")
        return _planned(plan, folder)
    rows = journal.read(folder, "edited")
    for event in events:
        if event["event"] == "edited":
            _say("the question has been edited since its first run, and goes on as it was planned; name= starts anew")
            for key, (was, now) in event["changes"].items():
                _say(f"  {key} was {was} and is now {now}")
            if rows and rows[-1]["sha256"] == event["sha256"] and rows[-1]["changes"] == event["changes"]:
                continue
        else:
            added = event["arms"] if event["event"] == "added_arms" else event["seeds"]
            _say(f"{event['event'].replace('_', ' ')}: {', '.join(map(str, added))}")
        journal.append(folder, **event)
    merged = replace(merged, name=folder.name)  # which may have been renamed, or be a copy
    merged.write(folder)
    return merged


def _planned(plan: Plan, folder: Path) -> Plan:
    require_answerable(plan, Configs(plan, composed, plan.execution))  # told before anything is made
    plan.write(folder)
    journal.append(folder, "planned", seeds=plan.seeds, arms=list(plan.arms), sha256=plan.sha256)
    return plan


def _work(plan: Plan, folder: Path, settings: AblateSettings, lock: int, out: TextIO) -> Result:
    execution = plan.execution
    configs = Configs(plan, composed, execution)
    first = configs.of(plan.baseline, plan.sizes[0])
    slots = _slots(settings, first)
    modules = ["wandb"] if first["logger"]["name"] == "wandb" else []
    here = Local(folder, folder.parent, slots, Warm(modules, [lock]), execution)
    executor: Any = here
    try:
        plan, costs, unfit = _measured(plan, configs, folder, here)
        configs = Configs(plan, composed, execution)
        for residual in matching.residuals(plan, costs):
            _say(str(residual))
        for why in dict.fromkeys(no_reference(plan, folder, size) for size in plan.sizes):
            if why:
                _say(f"no run of the uniform kernel beside the arms: {why}")
        if settings.executor == "print":
            return printed(plan, folder, configs, execution, unfit, out)
        if settings.executor != "local":
            here.close()
            executor = _submitit(settings, folder, execution, first)
        places = None if settings.executor == "slurm" else len(slots) if executor is here else settings.slots or 1
        with _counted_signals() as stops, Progress(measured_alone(plan, costs), places) as progress:
            planner = Planner(plan, folder, configs, executor, progress, lambda: len(stops), unfit)
            began = time.time()
            result = planner.run()
            if executor is here and (used := use(folder, len(slots), began)) is not None:
                _say(used)
            if stops:
                _say(f"{result.finished} runs are finished, {result.left} left; the same command goes on")
                raise SystemExit(128 + (signal.SIGINT if stops[0] == signal.SIGINT else signal.SIGTERM))
            if not executor.waits and result.left:
                _say(f"{result.left} runs are left, and those that can start are with SLURM; the same command goes on")
                return replace(result, stopped=True)
            return result
    finally:
        executor.close()
        here.close()


def _slots(settings: AblateSettings, cfg: dict[str, Any]) -> list[Slot]:
    devices, accelerator = cfg["trainer"]["devices"], cfg["trainer"]["accelerator"]
    processors = graphics_processors() if accelerator in ("auto", "gpu") else []
    per_run = devices if isinstance(devices, int) else max(1, len(processors))
    return make_slots(settings.slots, settings.threads, per_run, bool(processors), settings.pin)


def _measured(plan: Plan, configs: Configs, folder: Path, here: Local) -> tuple[Plan, matching.Costs, dict[str, str]]:
    """Every arm measured alone, and the plan with what makes arms alike; arms that cannot be built, and why."""
    runs = str(here.runs)
    costs, unfit = matching.measure_all(configs, folder, runs, _told(here))
    require_opponent(plan, unfit)
    adjusted = matching.match(matching.on_ladder(plan, costs), configs, costs)
    # What was adjusted before the first run stays, whatever this machine measures today.
    kept = {s: adjusted.matched.get(s, {}) | plan.matched.get(s, {}) for s in adjusted.matched | plan.matched}
    if kept == plan.matched:
        return plan, costs, unfit
    plan = replace(plan, matched=kept)
    if plan.ladder is not None and plan.match != "none":
        plan = replace(plan, matched=_again(plan, configs, folder, here))
    configs = Configs(plan, configs.compose, configs.execution)
    costs, more = matching.measure_all(configs, folder, runs, _told(here))
    if (folder / FILE).is_file():
        plan.write(folder)
        matching.log_matched(folder, plan, costs)
    require_opponent(plan, unfit | more)
    return plan, costs, unfit | more


def _told(here: Local) -> matching.Measure:
    """It takes seconds for each arm and size, in which nothing else would be said."""

    def measure(job: Path, out: Path, log: Path) -> int | None:
        _say(f"measuring {'/'.join(job.with_suffix('').parts[job.parts.index('measured') + 1 :])}")
        return here.measure(job, out, log)

    return measure


def _again(plan: Plan, configs: Configs, folder: Path, here: Local) -> dict[str, dict[str, list[str]]]:
    """Matched once more where the ladder has changed the steps that are matched."""
    configs = Configs(plan, configs.compose, configs.execution)
    costs, _ = matching.measure_all(configs, folder, str(here.runs), _told(here))
    return matching.match(plan, configs, costs).matched


def _submitit(settings: AblateSettings, folder: Path, execution: list[str], cfg: dict[str, Any]) -> Any:
    from softattn_lm.ablation.executors.submitted import Submitit

    devices = cfg["trainer"]["devices"]
    return Submitit(
        folder,
        folder.parent,
        execution,
        cluster="slurm" if settings.executor == "slurm" else "local",
        slots=settings.slots,
        threads=settings.threads or 1,
        gpus=devices if isinstance(devices, int) and cfg["trainer"]["accelerator"] in ("auto", "gpu") else 0,
        parameters=settings.slurm,
        waits=settings.wait,
    )


def _dry_run(plan: Plan, folder: Path, settings: AblateSettings) -> None:
    if (folder / FILE).is_file():
        merged, events = agreed(Plan.read(folder), plan)
        plan = plan if may_be_anew(folder, events) else merged
    configs = Configs(plan, composed, plan.execution)
    require_answerable(plan, configs)
    slots = _slots(settings, configs.of(plan.baseline, plan.sizes[0]))
    with tempfile.TemporaryDirectory() as scratch:
        # Token files are kept where the runs will look for them.
        place = folder if (folder / FILE).is_file() else Path(scratch) / plan.name
        here = Local(place, folder.parent, slots, Warm(), plan.execution)
        try:
            plan, costs, unfit = _measured(plan, configs, place, here)
        finally:
            here.close()
        stages = Stages(plan, folder, Configs(plan, composed, plan.execution), measured=place)
        show_dry_run(plan, stages, costs, unfit, len(slots), matching.residuals(plan, costs))


def _report(folder: Path, result: Result) -> None:
    if result.stopped:
        return
    if result.finished:
        make_report(folder)
    for run, reason in result.failed.items():
        _say(f"failed: {run}: {reason}")
    if result.failed:
        raise SystemExit(1)


def make_report(folder: Path) -> None:
    from softattn_lm.commands.report import make  # scipy, statsmodels and matplotlib come along

    make(folder)


@contextmanager
def _counted_signals() -> Iterator[list[int]]:
    """The signals that came and end the ablation; a handler that raised would meet the planner anywhere."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
