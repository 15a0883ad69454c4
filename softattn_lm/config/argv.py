"""Sorts a command line into flags, overrides and words before Hydra sees it.

Hydra's grammar would refuse or change most natural sentences, so words (prompts, runs) and the values of raw keys
(paths, names) never pass through it. `--` ends options: what follows is words.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from softattn_lm.config.nearest import nearest
from softattn_lm.config.raw import encode
from softattn_lm.errors import UserError

_KEY = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@-]*")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """What a command takes: its name is that of its yaml and of its module in softattn_lm/commands."""

    name: str
    settings: str  # class in config/settings.py that types the top level of its yaml
    words: Literal["none", "runs", "prompt", "topic"]  # meaning of positional words
    raw: frozenset[str] = frozenset()  # keys whose value is taken as typed; `a.` stands for all below a
    sweeps: bool = False


@dataclass
class Arguments:
    help: bool = False
    multirun: bool = False
    job: str | None = None  # file of a resolved config: how a sweep starts its jobs
    overrides: list[str] = field(default_factory=list)  # for Hydra; raw values encoded
    words: list[str] = field(default_factory=list)  # as typed


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
            found.words += rest
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


def _is_override(command: Command, word: str, known: Collection[str]) -> bool:
    """Whether a word is key=value. A prompt may contain `=`: there, only a known key or nearly one counts."""
    key, equals, _ = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        return bool(equals) and command.words != "prompt"
    if command.words != "prompt" or _bare(key) in known:
        return True
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
    if not value and not key.startswith("~"):
        raise UserError(f"{key}= has no value; write {key}=something, or {key}=null for none")
    bare = _bare(key)
    if bare in seen:
        raise UserError(f"{bare} is given twice: {seen[bare]} and {word}")
    seen[bare] = word
    raw = bare in command.raw or any(bare.startswith(name) for name in command.raw if name.endswith("."))
    found.overrides.append(f"{key}={encode(value)}" if raw else word)


def _bare(key: str) -> str:
    return key.lstrip("+~")


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
    if command.words == "none":
        word = words[0]
        left, _, right = word.partition(".")
        if left in known and right:
            raise UserError(f"{word!r} has no value: to choose from a group write {left}={right}, for a key {word}=...")
        close = nearest(word, known)
        hint = f"did you mean {close}=...?" if close else "settings are written key=value, see --help"
        raise UserError(f"{command.name} takes no plain word, but {word!r} came; {hint}")
    if command.words == "prompt" and len(words) > 2:
        raise UserError(
            f"{command.name} takes a prompt and a run, but {len(words)} words came; put the prompt in quotes"
        )
