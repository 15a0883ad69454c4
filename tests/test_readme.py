"""What README.md promises to be there is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_test_that_the_readme_names_exists():
    named = re.findall(r"`(?:(test_\w+\.py)(?:::(test_\w+))?|(test_\w+))`", README)
    assert len(named) > 20
    file = ""
    for in_file, first, alone in named:
        file = in_file or file  # a name alone stands in the file named before it
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {first or alone}" in text, (file, first or alone)


def test_every_command_that_the_readme_types_exists():
    for command in set(re.findall(r"^softattn (\w+)", README, re.MULTILINE)):
        assert (ROOT / "softattn_lm" / "commands" / f"{command}.py").is_file(), command
    for file in set(re.findall(r"python ((?:scripts|tests)/\w+\.py)", README)):
        assert (ROOT / file).is_file(), file
