"""`ablate executor=print`: a shell is given what it prints, until the report comes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from softattn_lm.ablation import journal
from softattn_lm.cli import main
from softattn_lm.commands import ablate as command
from softattn_lm.runs.status import read_status, write_status
from tests.ablation import losses, quick, words

ASKED = "arms:\n  good: []\n  other: [scale=learned]\n  bad: [attention=linear, position=alibi]\nseeds: 2\n"
HOLDS = """
import sys, pathlib; from softattn_lm.runs.lock import in_hand
with in_hand(pathlib.Path(sys.argv[1])):
    print(flush=True), sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name a shell would take apart, and a question of which one arm cannot be built."""
    quick(monkeypatch)
    folder = tmp_path / "it's $here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "q.yaml").write_text(ASKED)
    return folder


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    monkeypatch.setattr(command, "make_report", found.append)
    return found


def asked(capfd: pytest.CaptureFixture[str], folder: Path) -> tuple[int, list[str], str]:
    """(exit status, stdout, stderr) of the question, typed in its folder with relative paths."""
    with pytest.raises(SystemExit) as stop:
        main("ablate", [*words(folder, "q.yaml", "steps=2", "executor=print", here=True)])
    said = capfd.readouterr()
    return int(stop.value.code or 0), said.out.splitlines(), said.err


def runs_of(lines: list[str]) -> list[str]:
    found = [shlex.split(line.replace("&&", " "))[-10:] for line in lines]
    return ["/".join(w.split("/")[-3:]) for line in found for w in line if w.startswith("resume=")]


def trained(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What the line does in a shell, in this process."""
    cd, there, also, _, module, package, name, *typed = shlex.split(line)
    assert (cd, also, module, package, name) == ("cd", "&&", "-m", "softattn_lm", "train")
    monkeypatch.chdir(there)
    with pytest.raises(SystemExit) as stop:
        main("train", typed)
    assert stop.value.code in (0, None)
    monkeypatch.chdir(folder)
    capfd.readouterr()


@pytest.mark.slow
def test_what_is_printed_runs_in_a_shell_and_typed_again_reports(
    place: Path, reported: list[Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arms that cannot be built were printed too, and paths were those of the folder it was typed in."""
    code, lines, said = asked(capfd, place)
    assert code == 0 and "arm bad is left out" in said and "alibi" in said
    expected = [f"report/{arm}/seed-{seed}" for seed in (0, 1) for arm in ("good", "other")]
    assert [run for run in runs_of(lines) if run.startswith("report")] == expected
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(["sh", "-ec", lines[0]], cwd="/", env=environment, check=True, capture_output=True)
    assert read_status(place / "runs" / "q" / "report" / "good" / "seed-0")["state"] == "finished"
    assert asked(capfd, place)[1] == lines[1:] and not reported
    for line in lines[1:]:
        trained(line, place, monkeypatch, capfd)
    code, lines, said = asked(capfd, place)
    assert not lines and reported and code == 1 and "failed: bad: " in said
    assert len(losses(place / "runs" / "q")) == 4


def test_a_run_that_failed_is_told_with_what_tries_it_again_and_holds_nobody_up(
    place: Path, reported: list[Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was printed again every time, and the report never came."""
    _, lines, _ = asked(capfd, place)
    folder = place / "runs" / "q"
    for line in (line for line in lines if not line.endswith("other/seed-1") and "other/seed-1 " not in line):
        trained(line, place, monkeypatch, capfd)
    write_status(folder / "report" / "other" / "seed-1", "failed", step=1, steps=2, error="the disk is full")
    code, none, said = asked(capfd, place)
    assert (code, none) == (1, []) and reported
    assert "report/other/seed-1: the disk is full; what tries it again: cd " in " ".join(said.split())
    assert {"report/other/seed-1", None} == {row["run"] for row in journal.read(folder, "failed")}
    trained(said.rpartition("what tries it again: ")[2].splitlines()[0], place, monkeypatch, capfd)
    assert "seed-1" not in asked(capfd, place)[2] and len(losses(folder)) == 4


def test_a_run_at_work_elsewhere_is_not_printed_again(
    place: Path, reported: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    _, lines, _ = asked(capfd, place)
    run = place / "runs" / "q" / "report" / "good" / "seed-0"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run)], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        code, now, said = asked(capfd, place)
        assert code == 0 and now == lines[1:] and f"{len(now)} to run, 1 being trained" in said and not reported
        process.communicate()
    assert asked(capfd, place)[1] == lines
