"""Sorts a command line into flags, overrides and words before Hydra sees it.

Hydra's grammar would refuse or change most natural sentences, so words (prompts, runs) and the values of raw keys
(paths, names) never pass through it. `--` ends options: what follows is words, for a command with a prompt the prompt
and then perhaps a run.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from softattn_lm.config.nearest import nearest
from softattn_lm.config.raw import encode
from softattn_lm.config.signature import signature
from softattn_lm.config.tree import choices, config_folder
from softattn_lm.config.values import allows_null
from softattn_lm.errors import UserError

_KEY = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@-]*")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """What a command takes: its name is that of its yaml and of its module in softattn_lm/commands."""

    name: str
    settings: str  # class in config/settings.py that types the top level of its yaml
    words: Literal["none", "runs", "prompt", "topic", "question"]  # meaning of positional words
    raw: frozenset[str] = frozenset()  # keys whose value is taken as typed; `a.` stands for all below a
    sweeps: bool = False
    passes_on: str | None = None  # the command to which settings that are not its own go


@dataclass
class Arguments:
    help: bool = False
    multirun: bool = False
    job: str | None = None  # file of a resolved config: how a sweep starts its jobs
    overrides: list[str] = field(default_factory=list)  # for Hydra; raw values encoded
    words: list[str] = field(default_factory=list)  # as typed
    prompt: str | None = None  # as typed after `--`, so that it is nothing else


def sort(command: Command, argv: list[str], known: Collection[str]) -> Arguments:
    """`known`: the keys and groups of the command, to tell an override from a prompt that contains `=`.

    Raises UserError for what can be told without composing: flags, words that fit nowhere, missing values, duplicates.
    """
    found = Arguments()
    seen: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            if command.words == "prompt" and rest:
                found.prompt = rest.pop(0)
            found.words += rest
            _check_no_settings(command, rest, known)
            break
        if word in ("-h", "--help"):
            found.help = True
        elif word in ("-m", "--multirun"):
            found.multirun = True
        elif word == "--job" and command.sweeps and rest:
            found.job = rest.pop(0)
        elif word == "--like" and "callable" in command.raw:
            if len(rest) < 2:
                raise UserError("--like takes a kind and a callable, such as --like sdpa my_file.py:my_function")
            for key in ("like", "callable"):
                _add_override(command, f"{key}={rest.pop(0)}", seen, found)
        elif _FLAG.fullmatch(word):
            raise UserError(_unknown_flag(command, word, known))
        elif _is_override(command, word, known):
            _add_override(command, word, seen, found)
        else:
            found.words.append(word)
    _check_words(command, found, known)
    if found.multirun and not command.sweeps:
        raise UserError(f"-m sweeps over trainings; {command.name} runs once")
    return found


def bracketed(word: str) -> str:
    """`ladder=nano,micro` as a list, which Hydra would take for a sweep."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if re.fullmatch(r"[\w.-]+(,[\w.-]+)+", value) else word


def _is_override(command: Command, word: str, known: Collection[str]) -> bool:
    """Whether a word is key=value. A prompt may contain `=`: there, only a known key or nearly one counts."""
    key, equals, value = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        return bool(equals) and command.words != "prompt"
    if command.words != "prompt":
        return True
    if _bare(key) in known:
        # "temperature=0.5 is a lot" is a sentence; only a text can hold blanks.
        return _is_raw(command, _bare(key)) or not re.search(r"\s", value.strip())
    close = nearest(_bare(key), known, cutoff=0.75)
    if close:
        raise UserError(
            f"{key} is no setting of {command.name}; did you mean {close}? If {word!r} is the prompt, put it after --"
        )
    return False


def _add_override(command: Command, word: str, seen: dict[str, str], found: Arguments) -> None:
    key, _, value = word.partition("=")
    if not _KEY.fullmatch(key):
        raise UserError(f"{word!r}: {key!r} is no name of a setting; write key=value")
    if key.startswith("~"):
        raise UserError(_removal(_bare(key)))
    if not value:
        raw = _is_raw(command, _bare(key))
        nullable = _may_be_null(command, _bare(key)) or ("." in key and not raw)  # constructors are asked later
        raise UserError(f"{key}= has no value; write {key}=something{f', or {key}=null for none' if nullable else ''}")
    bare = _bare(key)
    if bare in seen:
        raise UserError(f"{bare} is given twice: {seen[bare]} and {word}")
    seen[bare] = word
    raw = _is_raw(command, bare) and not (value == "null" and _may_be_null(command, bare))
    found.overrides.append(f"{key}={encode(value)}" if raw else word)


def _is_raw(command: Command, key: str) -> bool:
    return key in command.raw or any(key.startswith(name) for name in command.raw if name.endswith("."))


def _may_be_null(command: Command, key: str) -> bool:
    """Whether the bare word null means none for this raw key; for `runs` or a path it is a name like any other."""
    known = signature(f"softattn_lm.config.settings.{command.settings}")
    return known is not None and key in known.parameters and allows_null(known.parameters[key].annotation)


def _bare(key: str) -> str:
    return key.lstrip("+~")


def _removal(key: str) -> str:
    """What to type instead of `~key`: each setting goes to something that needs it."""
    there = choices(config_folder(), key)
    instead = f"type {key}= and one of {', '.join(there)}" if there else f"type {key}= and another value"
    return f"~{key} would remove {key}, and every setting is needed; {instead}"


def _unknown_flag(command: Command, word: str, known: Collection[str]) -> str:
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    close = nearest(name, known)
    hint = f"; settings are written {close}=..." if close else "; settings are written key=value, see --help"
    ending = ", and a prompt that starts with - goes after --" if command.words == "prompt" else ""
    return f"unknown option {word}{hint}{ending}"


def _check_words(command: Command, found: Arguments, known: Collection[str]) -> None:
    words = found.words
    if found.help or not words:
        return
    if command.words == "none" and words[0].startswith("~") and _bare(words[0]) in known:
        raise UserError(_removal(_bare(words[0])))
    if command.words == "none":
        word = words[0]
        left, _, right = word.partition(".")
        if left in known and right:
            raise UserError(f"{word!r} has no value: to choose from a group write {left}={right}, for a key {word}=...")
        close = nearest(word, known)
        hint = f"did you mean {close}=...?" if close else "settings are written key=value, see --help"
        raise UserError(f"{command.name} takes no plain word, but {word!r} came; {hint}")
    n_words = len(words) + (found.prompt is not None)
    if command.words == "prompt" and n_words > 2:
        raise UserError(f"{command.name} takes a prompt and a run, but {n_words} words came; put the prompt in quotes")


def _check_no_settings(command: Command, words: list[str], known: Collection[str]) -> None:
    """`sample -- "seed=3" my-run runs=elsewhere`: what follows the prompt can only be a run."""
    for word in words:
        key, equals, _ = word.partition("=")
        if equals and _bare(key) in known:
            raise UserError(f"everything after -- is words, so {word} would be no setting; put {word} before --")
