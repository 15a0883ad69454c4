"""`--help`: read from the comments of the yaml files, so that it answers at once and never falls behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from softattn_lm.config.argv import Command
from softattn_lm.config.check import shown
from softattn_lm.config.compose import choices_and_config
from softattn_lm.config.tree import choices, command_groups, commented_keys, comments, first_comment

_USAGE = {
    "none": "[group=choice ...] [key=value ...]",
    "runs": "[run ...] [key=value ...]",
    "topic": "[topic] [key=value ...]",
    "question": "QUESTION [key=value ...]   or   key=ARM,ARM,... [key=value ...]",
    "prompt": '["prompt"] [run] [key=value ...]   or   [run] [key=value ...] -- "prompt"',
}


def overview(folder: Path, commands: dict[str, Command]) -> str:
    width = max(len(name) for name in commands)
    lines = ["usage: softattn COMMAND ...     (or python scripts/COMMAND.py ...)", ""]
    lines += [f"  {name:<{width}}  {first_comment(folder / f'{name}.yaml')}" for name in commands]
    return "\n".join([*lines, "", "softattn COMMAND --help lists what a command takes."])


def command_help(folder: Path, command: Command, overrides: Sequence[str]) -> str:
    """Usage; groups with their choices and one line on each; the keys of the command's own yaml; those of the choices.

    With overrides, what they choose is marked and listed: `train model=plain --help`.
    """
    file = folder / f"{command.name}.yaml"
    lines = [f"usage: softattn {command.name} {_USAGE[command.words]}{' [-m]' if command.sweeps else ''}"]
    lines += ["", *(comments(file) if command.words == "topic" else [first_comment(file)])]
    groups = [group for group in command_groups(folder, command.name) if choices(folder, group)]
    chosen, cfg = choices_and_config(command.name, overrides, folder) if groups else ({}, {})
    if groups:
        lines += ["", "Groups: type group=choice; * is chosen now."]
    for group in groups:
        lines += ["", f"  {group}="]
        width = max(len(name) for name in choices(folder, group))
        for name in choices(folder, group):
            mark = "*" if chosen.get(group) == name else " "
            lines.append(f"   {mark} {name:<{width}}  {first_comment(folder / group / f'{name}.yaml')}".rstrip())
    keys = commented_keys(file)
    width = max(len(f"{key}={value}") for key, value, _ in keys)
    lines += ["", "Settings:", ""]
    lines += [f"  {f'{key}={value}':<{width}}  {comment}".rstrip() for key, value, comment in keys]
    lines += _settings_of_choices(cfg, own={key.partition(".")[0] for key, _, _ in keys})
    if command.words == "prompt":
        lines += ["", "The prompt is taken as typed. A single word that is exactly the name of a run means that run,"]
        lines += ["and what looks like a setting or an option is one. What follows -- is always the prompt."]
    if command.words == "question":
        lines += _questions(folder, command)
    if command.sweeps:
        lines += ["", "-m runs every combination: -m attention=formula,sdpa seed=0,1"]
    return "\n".join(lines)


def _questions(folder: Path, command: Command) -> list[str]:
    lines = ["", "Questions; a yaml file of your own is one too:", ""]
    for name in choices(folder, "ablation"):
        lines.append(f"  {name:<16}{first_comment(folder / 'ablation' / f'{name}.yaml')}")
    lines += [
        "",
        f"Every other setting is one of {command.passes_on}, for all arms; the one with several values makes the",
    ]
    return [
        *lines,
        "arms, and the first of them is the baseline:",
        "",
        "  attention=sdpa,linear,my_kernel.py:Mine seeds=5 tune=lr",
    ]


def _settings_of_choices(cfg: dict[str, Any], own: set[str]) -> list[str]:
    lines: list[str] = []
    for key, value in cfg.items():
        if key in own:
            continue
        if isinstance(value, dict):
            plain = {k: v for k, v in value.items() if not k.startswith("_") and not isinstance(v, dict)}
            words = [f"{key}.{name}={shown(item)}" for name, item in plain.items()]
        else:
            words = [f"{key}={shown(value)}"]
        lines += wrap("  ".join(words), 116, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return ["", "Settings of the chosen files:", "", *lines] if lines else []
