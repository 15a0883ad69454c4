"""Tokens per second and model FLOPs utilisation: arithmetic on times that are taken anyway."""

import json

import pytest
import torch

from softattn_lm.commands import benchmark_gpu
from softattn_lm.errors import UserError
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.training.throughput import Throughput, peak_of, utilisation
from tests.tiny_run import tiny_train


def test_utilisation_is_operations_done_over_those_that_all_devices_could_do():
    assert utilisation(1000.0, 6e9, 1e13, devices=2) == pytest.approx(0.3)
    assert peak_of("NVIDIA H100 PCIe") == 756e12 and peak_of("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_of("a card that nobody knows") is None


def test_figures_are_of_the_time_since_the_last_ones():
    meter = Throughput(tokens_per_step=100, flops_per_token=6e9, peak=1e13)
    assert meter.figures(10, 2.0) == {"tokens_per_second": 500.0, "mfu": 0.3}
    assert meter.figures(20, 3.0) == {"tokens_per_second": 1000.0, "mfu": 0.6}
    assert meter.figures(20, 3.0) == {}
    assert Throughput(100, 6e9, None).of(5.0) == {"tokens_per_second": 5.0}


def test_rows_at_log_every_say_how_fast_it_was_unless_that_is_off(tmp_path):
    run = tiny_train(tmp_path, "training.throughput=true", "training.log_every=2", "steps=6")
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    told = [row["step"] for row in rows if "tokens_per_second" in row]
    assert told == [2, 3, 4, 6]  # 3 is written with the validation
    first, second = rows[3], rows[5]
    took = second["seconds"] - first["seconds"]
    assert second["tokens_per_second"] == pytest.approx(2 * 128 / took, rel=0.05)
    assert json.loads((run / "summary.json").read_text())["mfu"] is None  # of a CPU
    quiet = tiny_train(tmp_path)
    assert not any("tokens_per_second" in row for row in read_metrics(quiet))


def test_what_is_wrong_or_fails_on_a_device_ends_its_benchmark_with_an_error_and_the_rest_is_kept(
    monkeypatch, tmp_path
):
    zero, one, device = torch.zeros(3), torch.ones(3), torch.device("cpu")
    rows = [benchmark_gpu.agrees(name, [x], [one], device) for name, x in (("flex", zero), ("blockwise", one))]
    monkeypatch.setattr(benchmark_gpu, "checks", lambda device: rows)
    monkeypatch.setattr(benchmark_gpu, "training", lambda device: [])
    monkeypatch.setattr(benchmark_gpu, "saving", lambda device: [])
    monkeypatch.setattr(benchmark_gpu, "vocabulary", lambda device: [])

    def decoding(device):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(benchmark_gpu, "decoding", decoding)
    with pytest.raises(UserError, match=r"there went wrong: flex, decoding$"):
        benchmark_gpu.main(tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["what"] for row in found["rows"]] == ["flex", "blockwise"] and found["failed"] == {
        "decoding": "no room"
    }
