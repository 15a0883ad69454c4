"""What a person did wrong when Hydra refuses a command line: one line with the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from softattn_lm.config.nearest import meant, nearest
from softattn_lm.config.raw import decode
from softattn_lm.config.tree import choices, command_groups, commented_keys, defaults
from softattn_lm.config.tree import groups as every_group
from softattn_lm.errors import UserError


def require_readable(
    command: str, overrides: Sequence[str], folder: Path, sweep: bool = False
) -> list[tuple[str, Any]]:
    """(word as typed, Hydra's reading of it) of each override.

    Raises UserError for the first that Hydra cannot read, that chooses what is not there (from an optional group Hydra
    would silently choose nothing) or that has no meaning outside a sweep.
    """
    parsed = []
    for word in overrides:
        fault, override = _parse(word)
        if fault:
            raise fault
        if override.key_or_group.partition(".")[0].partition("/")[0] == "hydra":
            if not sweep:
                raise UserError(f"{decode(word)}: hydra's own settings have a meaning in sweeps only; add -m")
            continue
        parsed.append((decode(word), override))
    groups = command_groups(folder, command)
    for word, override in parsed:
        fault = _wrong_choice(command, word, override, groups, folder)
        if fault:
            raise fault
    return parsed


def explain(error: Exception, command: str, overrides: Sequence[str], folder: Path) -> UserError:
    """The UserError for the first override whose key is not there; Hydra's own message in one line if all are."""
    groups = command_groups(folder, command)
    parsed = require_readable(command, overrides, folder, sweep=True)
    known = known_keys(command, [word for word, override in parsed if override.key_or_group in groups], folder)
    chosen = {override.key_or_group: word.partition("=")[2] for word, override in parsed}
    for word, override in parsed:
        fault = _unknown_key(command, word, override, groups, known, chosen, folder)
        if fault:
            return fault
    return UserError(one_line(decode(str(error))))


def missing_value(error: Any, overrides: Sequence[str]) -> UserError:
    key = error.full_key or "a setting"
    group = key.partition(".")[0]
    chosen = next((decode(o) for o in overrides if o.startswith(group + "=")), "this choice")
    return UserError(f"{key} has no value: {chosen} needs {key}=...")


def one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def known_keys(command: str, group_choices: Sequence[str], folder: Path) -> list[str]:
    """Every dotted key of the command's config once its groups are chosen."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base="1.3"):
        for chosen in (list(group_choices), []):
            try:
                return list(_flat(OmegaConf.to_container(compose(command, chosen), resolve=False)))
            except HydraException:
                continue  # choices that cannot be composed together: the keys of the defaults are the next best
    return []


def _flat(value: Any, path: str = "") -> Collection[str]:
    if not isinstance(value, dict):
        return [path]
    inner = [name for key, item in value.items() for name in _flat(item, f"{path}.{key}" if path else str(key))]
    return [path, *inner] if path else inner


def _parse(word: str) -> tuple[UserError | None, Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return None, OverridesParser.create().parse_override(word)
    except HydraException as error:
        key, _, value = decode(word).partition("=")
        reason = one_line(str(error)).partition("; See https")[0]
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        hint = f"""; a value with blanks, commas, brackets or quotes goes in quotes of its own: "{key}='{quoted}'\""""
        return UserError(f"cannot read {decode(word)!r}: {reason}{hint}"), None


def _wrong_choice(command: str, word: str, override: Any, groups: Sequence[str], folder: Path) -> UserError | None:
    """`attention=spda`, also among the values of a sweep; null for a group from which something must be chosen."""
    key, value = override.key_or_group, decode(word).partition("=")[2]
    if override.is_delete():
        return None
    if key not in groups and key in every_group(folder):
        return UserError(f"{word}: {command} has no group {key}; its groups are {', '.join(groups) or 'none'}")
    if key in groups:
        there = choices(folder, key)
        may_be_null = defaults(folder / f"{command}.yaml").get(key, "needed") is None
        for choice in list(override.sweep_string_iterator()) if override.is_discrete_sweep() else [value.strip("'\"")]:
            if choice not in there and not (choice == "null" and may_be_null):
                hint = f"{key} is one of {', '.join(there)}{meant(choice, there)}"
                return UserError(f"{key}={choice}: no such choice; {hint}")
    return None


def _unknown_key(
    command: str,
    word: str,
    override: Any,
    groups: Sequence[str],
    known: Sequence[str],
    chosen: dict[str, str],
    folder: Path,
) -> UserError | None:
    """`lr=1,2` without -m, `model.size=small`, `attention.sdpa=true`, `model/siz=small`, `attentoin=sdpa`."""
    key = override.key_or_group
    if override.is_sweep_override() and (key in known or key in groups):
        return UserError(f"{word} gives several values: add -m to sweep over them, or put the value in quotes")
    if key in known or key in groups or override.is_add() or override.is_force_add():
        return None
    value = word.partition("=")[2]
    if key.replace(".", "/") in groups:
        slashed = key.replace(".", "/")
        return UserError(f"{word}: a choice from a group is written with a slash: {slashed}={value}")
    group, _, rest = key.rpartition(".")
    if group.replace(".", "/") in groups and rest in choices(folder, group.replace(".", "/")):
        slashed = group.replace(".", "/")
        return UserError(f"{word}: {rest} is a choice of the group {slashed}; type {slashed}={rest}")
    if "/" in key:
        return UserError(f"{word}: no group {key}{meant(key, groups) or '; groups are ' + ', '.join(groups)}")
    of_a_layer = _inside_a_pattern(key, value, groups, chosen, folder)
    if of_a_layer:
        return UserError(f"{word}: {of_a_layer}")
    elsewhere = _of_another_choice(command, key, groups, chosen, folder)
    if elsewhere:
        return UserError(elsewhere)
    candidates = [*groups, *known]
    close = nearest(key, candidates)
    if close is None and (folder / key.partition(".")[0]).is_dir():
        inside = [name for name in known if name.startswith(key.partition(".")[0] + ".")]
        return UserError(f"unknown setting {key}; there are {', '.join(inside)}")
    if close:
        return UserError(f"unknown setting {key}; did you mean {close}?")
    own = ", ".join(dict.fromkeys(name.partition(".")[0].partition("/")[0] for name in candidates))
    return UserError(f"unknown setting {key}{_of_another_command(command, key, folder)}; {command} has {own}")


def _inside_a_pattern(key: str, value: str, groups: Sequence[str], chosen: dict[str, str], folder: Path) -> str | None:
    """`attention.gate=true` with attention=pattern: the option of the layer that has it. `attention.options.delta.gate`
    without its plus sign."""
    group, _, name = key.partition(".")
    if group not in groups or chosen.get(group) != "pattern" or not name:
        return None
    if name.startswith("options."):
        return f"an option of a layer is added; type +{key}={value}"
    having = _choices_with(group, name, folder)
    named = re.findall(r"\w+", chosen.get(f"{group}.pattern", ""))
    used = [choice for choice in having if choice in named] or having
    if not used:
        return None
    typed = " or ".join(f"+{group}.options.{choice}.{name}={value}" for choice in used)
    return f"in a pattern, a setting is that of one choice; type {typed}"


def _choices_with(group: str, name: str, folder: Path) -> list[str]:
    """The choices of a group that have a setting of this name."""
    return [
        choice
        for choice in choices(folder, group)
        if {name, f"{group}.{name}"} & {known for known, _, _ in commented_keys(folder / group / f"{choice}.yaml")}
    ]


def _of_another_choice(
    command: str, key: str, groups: Sequence[str], chosen: dict[str, str], folder: Path
) -> str | None:
    """`attention.sink=one` with attention=sdpa: which choices of the group have that key."""
    group, _, name = key.partition(".")
    if group not in groups or not name:
        return None
    having = _choices_with(group, name, folder)
    if not having:
        return None
    now = chosen.get(group) or defaults(folder / f"{command}.yaml").get(group)
    return f"{group}={now} honours no {key}; type one of {', '.join(f'{group}={one}' for one in having)}"


def _of_another_command(command: str, key: str, folder: Path) -> str:
    """`prepare_data stepz=4`: steps is a setting of train."""
    for file in sorted(folder.glob("*.yaml")):
        close = nearest(key, [name for name, _, _ in commented_keys(file)], cutoff=0.75)
        if close and file.stem != command:
            return f"; {close} is a setting of {file.stem}"
    return ""
