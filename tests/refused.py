"""A command line in this process that a person typed wrongly."""

import pytest

from softattn_lm import cli


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command line is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(words[0], list(words[1:]))
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (2, ""), said.err
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err
