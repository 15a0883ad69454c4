"""The command line as a person meets it: help, exit status, one line for a fault, before torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import softattn_lm
from softattn_lm import cli
from softattn_lm.commands import COMMANDS
from softattn_lm.config.tree import choices, command_groups, config_folder, first_comment
from softattn_lm.errors import UserError

ROOT = Path(softattn_lm.__file__).parent.parent
# Runs the command line and then says whether torch came along.
PROBE = """
import sys
from softattn_lm.cli import main
try:
    main(sys.argv[1], sys.argv[2:])
finally:
    slow = {"torch", "lightning", "datasets", "wandb", "transformers", *WITHOUT} & set(sys.modules)
    assert not slow, slow
"""


def without_torch(*argv: str, nor: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the command line; it fails if torch, another slow package or one of `nor` was imported."""
    code = PROBE.replace("WITHOUT", repr(nor))
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_imports_nothing_slow_and_hydra_only_where_there_are_choices(command: str) -> None:
    has_choices = bool(command_groups(config_folder(), command))
    answer = without_torch(command, "--help", nor=("numpy", "tokenizers", *(() if has_choices else ("hydra",))))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"usage: softattn {command} ")


def test_help_of_sample_says_when_a_word_is_a_run_and_the_way_out() -> None:
    text = without_torch("sample", "--help").stdout
    assert '["prompt"] [run] [key=value ...]   or   [run] [key=value ...] -- "prompt"' in text.splitlines()[0]
    assert "exactly the name of a run means that run" in text and "-- is always the prompt" in text


def test_help_names_every_choice_with_its_line_and_marks_what_is_chosen() -> None:
    folder, text = config_folder(), without_torch("train", "model=plain", "-h").stdout
    for group in command_groups(folder, "train"):
        assert f"\n  {group}=\n" in text
        for choice in choices(folder, group):
            said = first_comment(folder / group / f"{choice}.yaml")
            assert said and f" {choice} " in text and said in text
    assert "* plain " in text and "* rotary " in text and "batch_size=12 " in text and "lr=" in text


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "model.n_haed=3"],
        ["train", "attention=spda"],
        ["train", "model.d_model=abc"],
        ["train", "training.compile=no"],
        ["train", "model.size=small"],
        ["train", "model.n_head=3"],
        ["train", "steps"],
        ["train", "--cfg", "job"],
        ["train", "-m", "attention=formula,spda"],
        ["train", "-m", "resume=x", "seed=0,1"],
        ["sample", "prompt", "temprature=0"],
        ["sample", "-m", "prompt"],
        ["sample", "temperature=-1", "prompt"],
        ["evaluate", "split=training"],
        ["evaluate", "file=nowhere.txt"],
        ["train", "model.dropout=1"],
        ["train", "lr=inf"],
        ["train", "data=text_file", "data.path=nowhere.txt"],
        ["train", "tokenizer=pretrained", "tokenizer.path=nowhere.json"],
        ["train", "~schedule"],
        ["train", "schedule=null"],
        ["prepare_data", "stepz=4"],
        ["prepare_data", "tokenizer=word"],
    ],
    ids=" ".join,
)
def test_a_fault_is_one_line_and_status_2_before_torch_is_imported(argv: list[str]) -> None:
    answer = without_torch(*argv)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1


def test_a_setting_of_sample_that_may_have_been_the_prompt_is_answered_with_two_dashes() -> None:
    said = without_torch("sample", "seed=three").stderr
    assert "seed must be a whole number" in said and "if that was the prompt, put it after --" in said
    assert "put runs=elsewhere before --" in without_torch("sample", "--", "seed=3", "my-run", "runs=elsewhere").stderr


def exit_status(*argv: str, command: str | None = None) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(command, list(argv))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("trian") == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_softattn_alone_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status() == 0
    assert all(f"  {name} " in capsys_line for name, capsys_line in zip(COMMANDS, _rows(capsys), strict=True))
    assert exit_status("--version") == 0
    assert capsys.readouterr().out == softattn_lm.__version__ + "\n"


def _rows(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (UserError("a\nb"), 2, "error: a; b\n"),
        (RuntimeError("ours"), 70, "Traceback"),
        (ValueError("ours too"), 70, "Traceback"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_the_exit_status_tells_whose_fault_it_was(
    raised: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert exit_status("train") == status
    assert capsys.readouterr().err.startswith(said)


def test_a_closed_pipe_is_quiet() -> None:
    code = "from softattn_lm import cli; cli._dispatch = lambda *_: [print(i) for i in range(200_000)]; cli.main()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "0\n"
    child.stdout.close()
    assert (child.wait(timeout=30), child.stderr.read()) == (141, "")
    child.stderr.close()


def test_the_three_ways_to_call_a_command_are_one() -> None:
    ways = [[str(ROOT / "scripts" / "train.py")], ["-m", "softattn_lm", "train"]]
    answers = {
        subprocess.run([sys.executable, *way, "--help"], capture_output=True, text=True, check=True).stdout
        for way in ways
    }
    assert answers == {without_torch("train", "--help").stdout}


def test_other_machines_are_refused_here_and_in_child_processes() -> None:
    code = (
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 0)) as s: socket.create_connection(s.getsockname()).close()\n"
        "udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for attempt in (lambda: socket.create_connection(('192.0.2.1', 80), 1),\n"
        "                lambda: udp.sendto(b'', ('192.0.2.1', 9)),\n"
        "                lambda: socket.getaddrinfo('example.org', 80)):\n"
        "    try: attempt()\n"
        "    except OSError as error: assert 'no other machine' in str(error), error\n"
        "    else: raise SystemExit('reached another machine')\n"
        "udp.close()\n"
    )
    exec(code, {})
    child = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (0, "")


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    code = (
        "import time; from softattn_lm import cli\n"
        "cli._dispatch = lambda *_: (print('ready', flush=True), time.sleep(60))\n"
        "cli.main('train', [])"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (130, "interrupted\n")
