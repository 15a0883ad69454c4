"""Do the tests notice? Plants one fault at a time in a copy of the checkout and runs the test that must fail.

    python tests/mutations.py                     all of them, two at a time
    python tests/mutations.py --list              what there is
    python tests/mutations.py --only NAME ...     some of them

The table of faults is tests/planted_faults.py. The checkout itself is never written to. Exit status 1 if a fault goes
unnoticed, if the text to replace is not found exactly once, or if a named test fails without any fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # as a command, Python has put the folder of this file there

from tests.fault import Fault  # noqa: E402
from tests.planted_faults import FAULTS  # noqa: E402

NEEDED = ("softattn_lm", "configs", "tests", "pyproject.toml")
AT_ONCE = 2  # each runs on one core
LIMIT_S = 300
TESTS_FAILED = 1  # pytest's exit status; everything above means that it did not come to a verdict


@dataclass(frozen=True)
class Outcome:
    """verdict: `caught`, `MISSED`, or why there is none."""

    fault: Fault
    verdict: str
    seconds: float


def copy_of_checkout(folder: Path, root: Path) -> Path:
    """What tests of the library need, without compiled files: an old one may pass for a text of the same second."""
    for name in NEEDED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    return folder


def pytest_in(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs the tests in a process that imports the copy and leaves nothing behind."""
    given = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command, cwd=folder, env=os.environ | given, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def planted(fault: Fault, folder: Path) -> str:
    """The text of the file with the fault in it. Raises ValueError if the place is not found exactly once."""
    text = (folder / fault.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"the old text stands {text.count(fault.old)} times in {fault.file}, not once")
    return text.replace(fault.old, fault.new)


def try_fault(fault: Fault, folder: Path) -> Outcome:
    """Plants the fault in a copy, runs its test, and takes the fault out again."""
    began, path = time.monotonic(), folder / fault.file
    sound = path.read_text(encoding="utf-8")
    try:
        path.write_text(planted(fault, folder), encoding="utf-8")
        status = pytest_in(folder, [fault.test]).returncode
        verdict = {0: "MISSED", TESTS_FAILED: "caught"}.get(status, f"NO VERDICT: pytest exits {status}")
    except ValueError as error:
        verdict = f"NO VERDICT: {error}"
    except subprocess.TimeoutExpired:
        verdict = f"NO VERDICT: more than {LIMIT_S} seconds"
    finally:
        path.write_text(sound, encoding="utf-8")
    return Outcome(fault, verdict, time.monotonic() - began)


def try_all(faults: Sequence[Fault], root: Path = ROOT) -> Iterator[Outcome]:
    """Outcomes as they come. Raises SystemExit if a test fails where nothing is planted: it would prove nothing."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as parent:
        folders: Queue[Path] = Queue()
        for number in range(min(AT_ONCE, len(faults))):
            folder = Path(parent, str(number))
            folder.mkdir()
            folders.put(copy_of_checkout(folder, root))
        sound = folders.get()
        first = pytest_in(sound, sorted({fault.test for fault in faults}))
        if first.returncode:
            sys.exit(f"the tests fail before anything is planted:\n{first.stdout[-3000:]}{first.stderr[-2000:]}")
        folders.put(sound)

        def one(fault: Fault) -> Outcome:
            folder = folders.get()
            try:
                return try_fault(fault, folder)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in as_completed([pool.submit(one, fault) for fault in faults]):
                yield done.result()


def main(arguments: Sequence[str] | None = None, faults: Sequence[Fault] = FAULTS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[f.name for f in faults], help="try these only")
    asked = parser.parse_args(arguments)
    chosen = [fault for fault in faults if asked.only is None or fault.name in asked.only]
    width = max(len(fault.name) for fault in chosen)
    if asked.list:
        for fault in chosen:
            print(f"{fault.name:{width}}  {fault.file}  {fault.test}")
        return 0
    print(f"{'fault':{width}}  {'verdict':8}{'seconds':>7}  test")
    outcomes = []
    for outcome in try_all(chosen, root):
        outcomes.append(outcome)
        short = outcome.fault.test.removeprefix("tests/")
        print(f"{outcome.fault.name:{width}}  {outcome.verdict:8}{outcome.seconds:7.1f}  {short}", flush=True)
    caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults caught")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
