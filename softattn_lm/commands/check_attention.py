"""check_attention: the contract on one attention, ours or anybody's, as a table; then what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from softattn_lm.config.settings import CheckAttentionSettings, section
from softattn_lm.config.tree import choices, config_folder, defaults
from softattn_lm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from softattn_lm.contract.cost import Cost
    from softattn_lm.contract.hf_properties import HFSubject
    from softattn_lm.contract.property import Verdict
    from softattn_lm.contract.subject import Subject

PARTS = ("mask", "position", "scale", "projections")


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """Raises SystemExit(1) if a property fails, after one line that names those that do."""
    settings = section(CheckAttentionSettings, cfg)
    if (settings.like is None) != (settings.callable is None):
        raise UserError("a callable of another stack is given with its kind: --like sdpa my_file.py:my_function")
    if settings.like is not None and any(cfg.get(part) for part in PARTS):
        raise UserError(
            f"--like {settings.like} tries a callable as it is; leave out mask, position, scale and projections"
        )
    if settings.like is not None and cfg["attention"] != _default_attention(cfg):
        raise UserError(f"--like {settings.like} tries a callable in the place of attention=; give one of the two")
    if settings.all:
        from softattn_lm.contract.table import tables

        print(tables(variants()))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a file or a pipe has no width of its own
    subject = _like(settings.like, str(settings.callable), settings.same_as_eager) if settings.like else _composed(cfg)
    verdicts = list(_verdicts(subject))
    _show(console, subject.name, verdicts)
    if settings.cost:
        _show_costs(console, subject, verdicts)
    failed = [verdict.name for verdict in verdicts if not verdict.ok]
    if failed:
        hint = getattr(subject, "hint", "")
        if hint:
            console.print(hint, highlight=False, soft_wrap=True)
        console.print(f"fails: {', '.join(failed)}", style="bold red", highlight=False, soft_wrap=True)
        raise SystemExit(1)
    untried = sum(not verdict.tried for verdict in verdicts)
    console.print(f"holds: {len(verdicts) - untried} properties, {untried} not tried", highlight=False)


def _default_attention(cfg: dict[str, Any]) -> dict[str, Any]:
    """The node of a command line that chose none."""
    folder = config_folder()
    name = defaults(folder / "check_attention.yaml")["attention"]
    node = yaml.safe_load((folder / "attention" / f"{name}.yaml").read_text(encoding="utf-8"))
    return node | {"dropout": cfg["model"]["dropout"]}


def variants() -> Iterator[tuple[str, Subject]]:
    """(name, subject) of every attention in configs/attention that is a kernel by itself."""
    from softattn_lm.config.build import build
    from softattn_lm.contract.subject import Subject

    folder = config_folder()
    for name in choices(folder, "attention"):
        node = yaml.safe_load((folder / "attention" / f"{name}.yaml").read_text(encoding="utf-8"))
        if not node.get("_partial_") or "pattern" in node:
            continue
        node = {key: 0.0 if value == "${model.dropout}" else value for key, value in node.items()}
        yield name, Subject(name, build(node))


def _composed(cfg: dict[str, Any]) -> Subject:
    """Our own or a custom kernel, with the parts of a model that were chosen."""
    from softattn_lm.attention.pattern import Pattern
    from softattn_lm.config.build import build
    from softattn_lm.contract.subject import Subject

    given = {part: build(cfg[part]) for part in PARTS if cfg.get(part)}
    policy = build(cfg["attention"])
    name = cfg["attention"].get("target") or cfg["attention"]["_target_"].rpartition(".")[2]
    subject = Subject(name, policy, given)
    patterns = [part for part in (policy, *given.values()) if isinstance(part, Pattern)]
    if patterns:
        given["n_layer"] = max(len(pattern.layers) for pattern in patterns)
    model = subject.model()  # parts that do not fit each other are refused here, in one line
    for mask in model.masks:
        if mask.window is not None and mask.window >= model.context:
            raise UserError(
                f"mask.window={mask.window} hides nothing in the texts that are tried, of {model.context} tokens; type "
                "mask.window=5"
            )
    return subject


def _like(kind: str, target: str, same_as_eager: bool) -> Subject | HFSubject:
    from softattn_lm.config.custom import load

    place, _, names = target.rpartition(":")
    found = [load(f"{place}:{name}", f"--like {kind} {target}") for name in names.split(",")]
    if len(found) > 1 and kind != "flex":
        raise UserError(f"--like {kind} {target}: give one name")
    if kind == "hf":
        from softattn_lm.contract.hugging_face import like_hf

        return like_hf(target, found[0], same_as_eager)
    from softattn_lm.contract.foreign import like_flex, like_sdpa

    for one in found:
        if not callable(one):
            raise UserError(f"--like {kind} {target}: that is a {type(one).__name__}, and cannot be called")
    return like_flex(target, *found) if kind == "flex" else like_sdpa(target, found[0])


def _verdicts(subject: Subject | HFSubject) -> Iterator[Verdict]:
    from softattn_lm.contract.subject import Subject
    from softattn_lm.contract.trial import trial, try_all

    if isinstance(subject, Subject):
        return trial(subject)
    from softattn_lm.contract.hf_properties import MEASURES

    return try_all(subject, MEASURES, subject.untried)


def _show(console: Console, name: str, verdicts: list[Verdict]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("property", "verdict", "worst error", "allowed", "where", title=name, title_justify="left")
    for verdict in verdicts:
        worst = verdict.worst
        if not verdict.tried:
            table.add_row(verdict.name, "not tried", "", "", Text(worst.where))
            continue
        said = Text("holds", style="green") if verdict.ok else Text("FAILS", style="bold red")
        table.add_row(verdict.name, said, f"{worst.error:.2g}", f"{worst.allowed:.2g}", Text(worst.where))
    console.print(table)


def _show_costs(console: Console, subject: Subject | HFSubject, verdicts: list[Verdict]) -> None:
    from softattn_lm.attention.pattern import Pattern
    from softattn_lm.contract.subject import Subject

    if any(verdict.worst.where.startswith("raised ") for verdict in verdicts):
        console.print("cost: not measured, since a property raised")
    elif isinstance(subject, Subject) and isinstance(subject.policy, Pattern):
        console.print("cost: not measured for a pattern; check each of its kernels")
    elif isinstance(subject, Subject):
        from softattn_lm.contract.cost import kernel_costs

        both = "forward and backward" if subject.refusal("training") is None else "forward"
        console.print(_costs_table(f"{both}, one sequence, 4 heads of 32, float32", kernel_costs(subject)))
    else:
        from softattn_lm.contract.hugging_face import model_costs

        console.print(_costs_table("forward and backward of the model, one sequence, float32", model_costs(subject)))


def _costs_table(title: str, rows: list[Cost]) -> Any:
    from rich.table import Table

    names = list(rows[0].against)
    table = Table(title=title, title_justify="left")
    for heading in ("tokens", "ms", *(f"time / {n}" for n in names), "peak MiB", *(f"memory / {n}" for n in names)):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{row.against[name][0]:.2f}" for name in names]
        memories = [f"{row.against[name][1]:.2f}" for name in names]
        table.add_row(str(row.length), f"{1e3 * row.seconds:.1f}", *times, f"{row.bytes / 2**20:.1f}", *memories)
    return table
