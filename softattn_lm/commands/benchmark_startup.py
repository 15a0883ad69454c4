"""`benchmark startup`: seconds until a command answers, and until the first optimizer step is in the record of a run.

Each is a process of its own; what can be cached (the prepared corpus, compiled Python) was used in a round before.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from softattn_lm.commands.comparison import Report, Row, interleaved, seconds_of
from softattn_lm.config.settings import BenchmarkSettings

HELP, ERROR = 1.0, 1.5  # seconds that an answer may take
FIRST_STEP = 1.6  # times what importing torch and lightning takes
EVERY = 0.002  # seconds between looks at the record
LIMIT = 300.0  # seconds
IMPORTS = [sys.executable, "-c", "import torch, lightning"]
TRAIN = [sys.executable, "-m", "softattn_lm", "train"]


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table and writes every figure to `file`."""
    report = Report(vars(settings), file)
    report.open()
    with tempfile.TemporaryDirectory() as scratch:
        cases = {
            "import": partial(seconds_of, partial(answer, IMPORTS, 0)),
            "help": partial(seconds_of, partial(answer, [*TRAIN, "--help"], 0)),
            "error": partial(seconds_of, partial(answer, [*TRAIN, "model.n_layers=4"], 2)),
            "first step": partial(until_first_step, Path(scratch)),
        }
        found = interleaved(cases, settings.repeats)
    imports = {"import torch, lightning": found["import"]}
    report.close(
        [
            *(
                Row(
                    what, "s", found[case], {"allowed": [allowed] * settings.repeats}, "allowed", 1.0,
                    more_is_better=False,
                )
                for what, case, allowed in (("train --help", "help", HELP), ("a config error", "error", ERROR))
            ),
            Row(
                "train, to its first optimizer step", "s", found["first step"], imports, "import torch, lightning",
                FIRST_STEP, more_is_better=False,
            ),
        ]
    )  # fmt: skip


def answer(command: list[str], status: int) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == status, done.stderr


def until_first_step(scratch: Path) -> float:
    """Seconds from the start of `train` on the shipped corpus until its first row is written; then it is killed."""
    name = f"{time.time_ns()}"
    words = [f"runs={scratch}", f"name={name}", "trainer=cpu", "training.log_every=1"]
    record = scratch / name / "metrics.jsonl"
    began = time.perf_counter()
    with subprocess.Popen([*TRAIN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not (record.is_file() and record.stat().st_size):
                assert process.poll() is None, f"{' '.join(words)} ended with {process.returncode} before a step"
                assert time.perf_counter() - began < LIMIT
                time.sleep(EVERY)
            return time.perf_counter() - began
        finally:
            process.kill()
