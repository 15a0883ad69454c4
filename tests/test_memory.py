"""Freed memory that a training process keeps."""

import os
import platform
import subprocess
import sys

import pytest

from softattn_lm.training import fit
from softattn_lm.training.memory import SETTINGS
from tests.tiny_run import tiny_train

FAULTS = """
import resource
from softattn_lm.training.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(b"1") * 40_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults(), keep_freed_memory(), faults(), faults())
"""


def counted(**environment: str) -> list[str]:
    without = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=without | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_block_that_was_freed_is_not_fetched_from_the_system_again():
    before, asked, _, after = counted()
    assert asked == "True" and int(after) < int(before) / 10


@pytest.mark.parametrize("name", SETTINGS)
def test_what_somebody_chose_stays(name):
    assert counted(**{name: "glibc.malloc.check=0" if name == "GLIBC_TUNABLES" else "131072"})[1] == "False"


def test_a_run_on_a_cpu_keeps_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(fit, "keep_freed_memory", lambda: asked.append(True))
    tiny_train(tmp_path, "steps=1")
    assert asked == [True]
