"""The command that plants faults: it finds what is there to be found, and says so when it finds nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault import Fault
from tests.mutations import ROOT, main, planted
from tests.planted_faults import FAULTS

CACHE = "softattn_lm/attention/cache.py"
GROUPS = "tests/test_formulas.py::test_grouped_heads_are_interleaved_not_tiled"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_a_place_in_the_code_and_changes_it(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    changed = planted(fault, ROOT)
    assert changed != text
    compile(changed, fault.file, "exec")  # a fault that does not compile would be caught by anything


def test_names_of_faults_are_unique_and_their_tests_stand_in_files_of_ours():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 24
    for fault in FAULTS:
        file, _, name = fault.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in Path(ROOT, file).read_text(encoding="utf-8"), fault.test


@pytest.mark.slow
def test_real_faults_are_caught_and_the_checkout_is_left_alone():
    names = ["groups of heads are tiled", "alibi: the sign of the slope"]
    before = (ROOT / CACHE).read_bytes()
    done = subprocess.run(
        [sys.executable, "tests/mutations.py", "--only", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 of 2 faults caught"
    assert sorted(line.split("  ")[0] for line in lines[1:-1]) == sorted(names)
    assert (ROOT / CACHE).read_bytes() == before


@pytest.mark.slow
def test_what_is_missed_misplaced_or_broken_is_not_called_caught(capsys):
    old = "torch.repeat_interleave(x, n_head // x.shape[1], dim=1)"
    faults = [
        Fault("harmless", CACHE, old, f"({old})", GROUPS),
        Fault("nowhere", CACHE, "text that is not there", "", GROUPS),
        Fault("everywhere", CACHE, "return", "pass", GROUPS),
        Fault("no program", CACHE, old, "(", GROUPS),
    ]
    assert main([], faults) == 1
    verdicts = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "MISSED" in verdicts["harmless"] and "0 of 4" in verdicts["0"]
    assert "stands 0 times" in verdicts["nowhere"] and "not once" in verdicts["everywhere"]
    assert "NO VERDICT: pytest exits" in verdicts["no"]


@pytest.mark.slow
def test_a_test_that_fails_without_a_fault_proves_nothing(tmp_path):
    for name in ("softattn_lm", "configs"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    with pytest.raises(SystemExit, match="fail before anything is planted"):
        main([], [Fault("any", "pyproject.toml", "", "", "tests/test_wrong.py::test_wrong")], tmp_path)
