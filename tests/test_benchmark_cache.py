"""What decoding remembers, as `benchmark cache` prints and writes it, against sizes worked out by hand."""

import json

import pytest

from softattn_lm import cli
from softattn_lm.commands.benchmark_cache import cases, measure
from softattn_lm.config.settings import BenchmarkSettings

SMALL = BenchmarkSettings(heads=4, head_dim=8, lengths=[300, 600], window=16)


@pytest.fixture(scope="module")
def found():
    return {name: measure(SMALL, case) for name, case in cases(SMALL).items()}


def test_a_token_costs_its_keys_and_values_and_a_state_costs_none(found):
    # 4 heads of 8 numbers of 4 bytes, for keys and for values; the latent of 4 · 8 numbers has 4 that turn beside it.
    kv = 4 * 8 * 4
    assert {name: figures["per_token"] for name, figures in found.items()} == {
        "sdpa": 2 * kv,
        "sdpa, 1 key heads of 4": 2 * kv / 4,
        "sdpa, K = V": kv,
        "sdpa, latent of 32": (32 + 4) * 4,
        "sdpa, window 16": 2 * kv,
        "linear": 0,
        "delta": 0,
        "delta, delta, delta, sdpa": 2 * kv / 4,
    }


def test_states_have_the_size_of_a_head_squared(found):
    constant = {name: figures["constant"] for name, figures in found.items()}
    # delta: D · D numbers per head; linear: as many, and a sum of D for its denominator; a hybrid of four layers has 3.
    assert constant["delta"] == 4 * 8 * 8 * 4 and constant["linear"] == 4 * (8 * 8 + 8) * 4
    assert constant["delta, delta, delta, sdpa"] == 3 * constant["delta"] / 4 and constant["sdpa"] == 0


def test_what_is_held_grows_with_the_text_for_softmax_and_for_nothing_else(found):
    growth = {name: figures["held"]["600"] - figures["held"]["300"] for name, figures in found.items()}
    assert {name for name, more in growth.items() if more == 0} == {"linear", "delta", "sdpa, window 16"}
    assert growth["sdpa"] == 300 * found["sdpa"]["per_token"]
    assert growth["sdpa, latent of 32"] == 300 * found["sdpa, latent of 32"]["per_token"]
    for name in ("linear", "delta"):
        assert found[name]["held"]["600"] == found[name]["constant"]


def test_the_command_prints_them_side_by_side_and_writes_them(tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main("benchmark", ["cache", "heads=4", "head_dim=8", "lengths=[300]", "window=16", f"runs={tmp_path}"])
    assert done.value.code == 0
    printed, progress = capsys.readouterr()
    assert "delta, delta, delta, sdpa" in printed and "100.0%" in printed  # a name is not broken at 80 columns
    assert progress.splitlines() == [f"case {n} of 8: {name}" for n, name in enumerate(cases(SMALL), start=1)]
    written = json.loads((tmp_path / "benchmark" / "cache.json").read_text())
    assert written["settings"]["heads"] == 4 and {"command", "machine", "started"} <= set(written)
    assert written["bytes_per_layer"]["sdpa, K = V"] == {
        "per_token": 128.0,
        "constant": 0.0,
        "held": {"300": 128.0 * (299 + 256)},  # the past of a context, and room for a call
    }


def test_lengths_that_take_minutes_are_not_read(capsys):
    with pytest.raises(SystemExit):
        cli.main("benchmark", ["cache", "lengths=[100000]"])
    assert "beyond the 8192 tokens" in capsys.readouterr().err
