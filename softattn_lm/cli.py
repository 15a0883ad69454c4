"""The command line: `softattn train ...`, `python -m softattn_lm train ...` and `python scripts/train.py ...` are one.

Exit status: 0 done, 1 a job of a sweep failed or an attention breaks its contract, 2 a person's fault (one line on
stderr), 70 ours (traceback), 130 interrupted, 129 to 143 by another signal (training/signals.py). Every exception is
caught here, and by contract/trial.py on trial only.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from softattn_lm import __version__
from softattn_lm.commands import COMMANDS
from softattn_lm.config.argv import Arguments, Command, bracketed, sort
from softattn_lm.config.faults import one_line
from softattn_lm.config.nearest import meant
from softattn_lm.config.raw import decode
from softattn_lm.config.tree import command_groups, commented_keys, config_folder
from softattn_lm.config.trust import trust_typed
from softattn_lm.errors import UserError, disk_fault, visible


def main(command: str | None = None, argv: list[str] | None = None) -> NoReturn:
    """Runs a command and exits. Without `command`, the first word of `argv` (by default sys.argv[1:]) names it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    answer(lambda: _dispatch(command, arguments))


def answer(run: Callable[[], object]) -> NoReturn:
    """Exits as every command does: 0; 2 for a mistake or a full disk, in one line; 130, 141; 70 is our fault."""
    # What is left at the end goes with the process; looking through torch's objects once more would take a second.
    atexit.register(gc.freeze)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            run()
        sys.stdout.flush()
    except UserError as error:
        print(visible(f"error: {one_line(str(error))}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:  # noqa: BLE001
        fault = disk_fault(error)
        print(
            visible(traceback.format_exc() if fault is None else f"error: {one_line(str(fault))}\n"),
            file=sys.stderr,
            end="",
        )
        _give_up_stdout()
        sys.exit(70 if fault is None else 2)
    sys.exit(0)


def _give_up_stdout() -> None:
    """Where stdout is a file on a full disk, Python would try again at exit, and end with a status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """One line, without the file and line of ours that gave it."""
    with suppress(OSError):  # nobody reads it, which is no reason to stop
        print(visible(f"warning: {one_line(str(message))}"), file=sys.stderr, flush=True)


def _dispatch(name: str | None, argv: list[str]) -> None:
    folder = config_folder()
    if name is None:
        if not argv or argv[0] in ("-h", "--help"):
            from softattn_lm.config.help import overview

            print(overview(folder, COMMANDS))
            return
        if argv[0] == "--version":
            print(__version__)
            return
        name, argv = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UserError(f"no command {name}{meant(name, COMMANDS) or '; there are ' + ', '.join(COMMANDS)}")
    command = COMMANDS[name]
    known = {*(key for key, _, _ in commented_keys(folder / f"{name}.yaml")), *command_groups(folder, name)}
    arguments = sort(command, argv, known)
    if arguments.help:
        from softattn_lm.config.help import command_help

        print(command_help(folder, command, arguments.overrides))
        return
    passed_on = _passed_on(command, arguments, known)
    trust_typed([*arguments.overrides, *passed_on])
    if arguments.multirun:
        from softattn_lm.commands.sweep import sweep

        sweep(command, arguments.overrides)
    else:
        _run(command, arguments, passed_on)


def _passed_on(command: Command, arguments: Arguments, known: Collection[str]) -> list[str]:
    """Takes from `arguments` what is no setting of this command, if it hands that on."""
    if command.passes_on is None:
        return []
    own = [word for word in arguments.overrides if word.partition("=")[0].lstrip("+").partition(".")[0] in known]
    others = [word for word in arguments.overrides if word not in own]
    # For Hydra, `seeds=0,1,2` would be a sweep.
    arguments.overrides = [bracketed(word) for word in own]
    return others


def _run(command: Command, arguments: Arguments, passed_on: list[str]) -> None:
    if command.name == "train":
        _train(command, arguments)
        return
    cfg = _config(command, arguments)
    module: Any = import_module(f"softattn_lm.commands.{command.name}")
    if command.words == "prompt":
        module.run(cfg, arguments.words, arguments.prompt)
    elif command.passes_on is not None:
        module.run(cfg, arguments.words, [decode(word) for word in passed_on])
    else:
        module.run(cfg, arguments.words)


def _train(command: Command, arguments: Arguments) -> None:
    """From here on SLURM may say that the time is up, and the job is run again."""
    from softattn_lm.commands.train import run
    from softattn_lm.runs.processes import is_first_process
    from softattn_lm.training import slurm
    from softattn_lm.training.signals import Left, asks_to_requeue, signals_end_the_run

    try:
        with signals_end_the_run():
            run(_config(command, arguments), arguments.words, [decode(word) for word in arguments.overrides])
    except Left as left:
        # The job of a sweep is the sweep's to run again, not SLURM's.
        if asks_to_requeue(left.number) and slurm.job_id() is not None and arguments.job is None and is_first_process():
            print(slurm.requeue())
        raise


def _config(command: Command, arguments: Arguments) -> dict[str, Any]:
    from softattn_lm.config.check import check
    from softattn_lm.config.compose import compose

    if arguments.job is None:
        try:
            return check(compose(command.name, arguments.overrides, config_folder()), command.settings)
        except UserError as error:
            if command.words == "prompt" and arguments.prompt is None and len(arguments.words) < 2:
                raise UserError(f"{error}; if that was the prompt, put it after --") from error
            raise
    from softattn_lm.commands.sweep import read_job

    return check(read_job(arguments.job), command.settings)
