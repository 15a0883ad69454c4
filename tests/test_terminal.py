"""Text of a corpus, a model, a path or a name shows as text: it moves no cursor and starts no markup."""

import io
import warnings
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from softattn_lm import cli
from softattn_lm.commands.sample import shown
from softattn_lm.errors import visible
from softattn_lm.training.console import plain_console
from tests.refused import refused


@pytest.mark.parametrize("name", ["../up", "a/../b", "/etc/x", "..", "a\x1b[31mb", "a\nb", "a\u202eb", "a\0b"])
def test_a_name_of_a_run_leaves_no_folder_and_sends_nothing_to_the_terminal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "train", f"name={name}", "runs=here", "steps=1")
    assert "\x1b" not in said and "\u202e" not in said
    assert not list(tmp_path.rglob("*ckpt"))


ESCAPES = "a\x1b[2Jb\x9b31m\x07\u202e[red]x[/red]<script>:smile:\r\x08"


def test_text_of_others_shows_as_text_on_a_terminal() -> None:
    assert visible("é日🙂\n\tx\u00a0y") == "é日🙂\n\tx\u00a0y"
    shown = visible(ESCAPES)
    assert shown == r"a\x1b[2Jb\x9b31m\x07\u202e[red]x[/red]<script>:smile:\r\x08"
    for renderable in (ESCAPES, Text(ESCAPES), Table(ESCAPES, title=ESCAPES)):
        console = plain_console()
        console.file, console._force_terminal, console.width = io.StringIO(), True, 200
        console.print(renderable)
        said = console.file.getvalue()
        assert r"\x1b[2J" in said and "[red]x[/red]" in said and ":smile:" in said
        assert not any(c in said for c in ("\x1b[2J", "\x9b", "\x07", "\u202e", "\x08"))


def test_a_path_and_a_warning_with_control_characters_are_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert r"\x1b[31mx.txt" in refused(capsys, "prepare_data", "data=text_file", "data.path=\x1b[31mx.txt")
    Path("\x1b[31mx.txt").write_text("\ufeffabcdefghij" * 20)
    with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
        warnings.simplefilter("default")
        cli.main("prepare_data", ["data=text_file", "data.path=\x1b[31mx.txt", "tokenizer=char"])
    said = capsys.readouterr()
    assert stop.value.code == 0 and "\x1b" not in said.out + said.err
    assert r"warning: \x1b[31mx.txt begins with a byte order mark" in said.err


def test_a_sample_with_control_sequences_shows_as_text_on_a_terminal_and_as_it_is_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert shown("a\x1b[31m") == r"a\x1b[31m"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert shown("a\x1b[31m") == "a\x1b[31m"
