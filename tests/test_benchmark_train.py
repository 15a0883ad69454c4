"""Benchmarks of training: both sides are the same model and do the same work, and figures are arithmetic on seconds."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from softattn_lm.attention.kernels.blockwise import Blockwise
from softattn_lm.commands import (
    bare_training,
    benchmark,
    benchmark_data,
    benchmark_gpu,
    benchmark_startup,
    benchmark_time_to_loss,
    benchmark_train_loops,
    peers,
)
from softattn_lm.commands import benchmark_train as timed
from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.benchmark_gpu import line
from softattn_lm.commands.comparison import Report, Row
from softattn_lm.errors import UserError
from softattn_lm.runs.new import new_run
from softattn_lm.training.break_even import break_even, not_compiled
from softattn_lm.training.run import train
from softattn_lm.training.throughput import peak_of, utilisation
from tests.tiny_run import losses, tiny_config, tiny_train

TINY = Shape(2, 32, 16, 4, 65)
SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"


def head_of_32(shape: Shape) -> int:
    return 1


@pytest.fixture(autouse=True)
def one_head(monkeypatch):
    monkeypatch.setattr(Shape, "heads", property(head_of_32))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_bare_loop_learns_its_tokens(bfloat16):
    loop = bare_training.ours(TINY, bfloat16)
    first = [float(loop.step()) for _ in range(bare_training.BATCHES)]
    for _ in range(8 * bare_training.BATCHES):
        loop.step()
    last = [float(loop.step()) for _ in range(bare_training.BATCHES)]
    assert sum(last) < sum(first) - 0.1 * len(first)


def test_tokens_per_second_of_train_leave_the_first_steps_out(monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("a text", encoding="ascii")
    monkeypatch.setattr(timed, "answer", lambda command, status: None)
    seconds = [100.0, 101.0, 102.0, 102.5, 103.0]  # three steps that warm up, two that are timed
    rows = [{"kind": "train", "step": step, "seconds": s} for step, s in enumerate(seconds, start=1)]
    monkeypatch.setattr(timed, "read_metrics", lambda run: rows)
    assert timed.rate_of_train(TINY, 2, tmp_path, "float32") == 2 * 4 * 16 / 1.0


@pytest.mark.slow
def test_train_is_timed_as_the_command(tmp_path):
    (tmp_path / "text.txt").write_text(timed.symbols(4000), encoding="ascii")
    assert timed.rate_of_train(TINY, 2, tmp_path, "float32") > 0


def in_this_process(command: list[str], status: int) -> None:
    """Another takes seconds to start."""
    at = len(timed.TRAIN)
    assert command[:at] == timed.TRAIN and status == 0
    cfg = timed.configured(command[at:])
    train(cfg, new_run(cfg["runs"], cfg["name"], cfg), console=Console(quiet=True))


@pytest.mark.slow
def test_a_case_is_run_from_end_to_end(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(timed, "answer", in_this_process)
    (tmp_path / "text.txt").write_text(timed.symbols(4000), encoding="ascii")
    rows = timed.compare(timed.Case(TINY, 4, 0.001, 1e-6, 1000.0), tmp_path, 2, half=True)
    assert [row.what for row in rows if "of the rate" in row.what] and len(rows) == 6
    there = [name for name in ("x-transformers",) if name not in peers.left_out()]
    assert list(rows[0].peers) == ["transformers", *there, "bare loop"]
    assert all(len(rates) == 2 and min(rates) > 0 for rates in rows[0].peers.values())
    assert all(len(row.ours) == 2 and min(row.ours) > 0 for row in rows)
    assert [row.reached for row in rows[:3]] == [True, True, True]
    products = rows[1].peers["products"]  # measured beside the others, in every round
    assert products == rows[0].limit and len(set(products)) == 2 and rows[1].of_limit is None


def test_compiled_loops_are_compared_and_break_even_is_said(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "where it was")
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda model: compiled.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    )
    row, said = benchmark_train_loops.compare_compiled(TINY, 2, tmp_path, 2)
    assert set(row.peers) == {"bare loop", "transformers, compiled"} and row.target is None
    assert len(row.ours) == 2 and min(row.ours) > 0
    assert compiled == [str(tmp_path / "compiled")] * 2
    assert said.startswith("compiling took ") and "; an optimizer step takes " in said and "this run" not in said
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "where it was"


def test_a_fault_of_ours_is_not_taken_for_a_missing_compiler(tmp_path, monkeypatch):
    def failing(*given):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(peers, "of_transformers", bare_training.ours)
    monkeypatch.setattr(torch.nn.Module, "compile", failing)
    report = Report({}, tmp_path / "x.json", Console(quiet=True), {"left_out": {}})
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        timed.say_compiled(timed.Case(TINY, 2, 1.0, None, 1.0), tmp_path, 2, report)
    assert not report.found["left_out"]


def test_without_a_compiler_the_compiled_loops_alone_are_lost(tmp_path, monkeypatch):
    def failing(*given):
        raise RuntimeError("InvalidCxxCompiler: none that works\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(peers, "of_transformers", bare_training.ours)
    monkeypatch.setattr(torch.nn.Module, "compile", failing)
    console = Console(record=True, width=80, file=io.StringIO())
    report = Report({}, tmp_path / "x.json", console, {"left_out": {}})
    assert timed.say_compiled(timed.Case(TINY, 2, 1.0, None, 1.0), tmp_path, 2, report) == []
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    (line,) = console.export_text().splitlines()
    assert line == report.found["left_out"]["the compiled bare loop"]
    assert line.startswith("the compiled bare loop is left out (InvalidCxxCompiler: none that works); it needs a C++ ")


def test_a_folder_of_any_name_is_taken_as_it_is(tmp_path):
    scratch = tmp_path / "It's, here = ${so} (1)"
    scratch.mkdir()
    (scratch / "text.txt").write_text("a text", encoding="ascii")
    cfg = timed.configured([*timed.overrides(TINY, scratch, "float32"), "steps=1"])
    assert (cfg["data"]["path"], cfg["runs"]) == (str(scratch / "text.txt"), str(scratch / "runs"))


def test_llama_style_loops_of_both_sides_are_compared():
    pytest.importorskip("transformers")
    row = benchmark_train_loops.compare_llama(TINY, 2, 2)
    assert row.what.endswith("bare loop, Llama-style") and row.target is None
    there = [name for name in ("litgpt",) if name not in peers.left_out()]
    assert list(row.peers) == ["transformers", *there] and row.peers["transformers"] != row.ours
    assert all(len(rates) == 2 and min(rates) > 0 for rates in (row.ours, *row.peers.values()))


def test_a_loss_that_was_not_reached_misses_the_target_whatever_the_time():
    def runs(loss: float, seconds: float) -> list[dict[str, float]]:
        return [{"loss": loss, "seconds": seconds}, {"loss": loss + 0.01, "seconds": seconds}]

    ours = benchmark_time_to_loss.name_of(benchmark_time_to_loss.AGAINST["published"][0])
    found = {"published": runs(1.9, 60.0), ours: runs(1.86, 6.0)}
    row = benchmark_time_to_loss.comparison("published", found)
    assert (row.ratio, row.target, row.reached) == (0.1, 1 / 6, True)
    found[ours] = runs(1.91, 6.0)
    row = benchmark_time_to_loss.comparison("published", found)
    assert row.reached is False and "NOT REACHED" in row.what


def test_tokenizers_alone_cut_the_text_as_ours_do(monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    monkeypatch.setattr(benchmark_data, "VOCABULARY", 512)
    benchmark_data.write_text(text, 40_000)
    assert text.stat().st_size in range(39_990, 40_001)
    tokens = {
        kind: [benchmark_data.work(who, kind, text) for who in ("ours", "tokenizers")] for kind in benchmark_data.KINDS
    }
    assert tokens["byte"] == [text.stat().st_size] * 2
    assert tokens["char"][0] == tokens["char"][1] == len(text.read_text(encoding="utf-8"))
    ours, alone = tokens["bpe"]
    assert abs(ours - alone) < 0.02 * alone  # cut into pieces at other places, so with other words at their ends


def test_an_answer_with_another_status_is_no_time():
    benchmark_startup.answer([sys.executable, "-c", "raise SystemExit(2)"], 2)
    with pytest.raises(AssertionError, match="because"):
        benchmark_startup.answer([sys.executable, "-c", "raise SystemExit('because')"], 0)


def test_seeds_that_are_none_are_refused():
    with pytest.raises(UserError, match=r"seeds=\[\] must be"):
        benchmark.run({"seeds": []}, ["time_to_loss"])


def test_a_peak_is_that_of_the_device_and_utilisation_its_share():
    assert peak_of("NVIDIA H200") == 989.4e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12 < peak_of("NVIDIA H100 80GB HBM3")
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12 and peak_of("NVIDIA A10") == 125e12
    assert peak_of("NVIDIA H200 NVL") < peak_of("NVIDIA H200")
    others = ("Something else", "NVIDIA RTX A1000", "NVIDIA L40", "NVIDIA GB200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert not any(map(peak_of, others))
    assert utilisation(1e6, 8e8, 1e15) == 0.8
    assert utilisation(1e6, 8e8, 1e15, devices=2) == 0.4


def test_a_line_says_what_was_aimed_at():
    row = Row("decode", "tokens/s", [1.0, 3.0], {"limit": [4.0, 4.0]}, "limit", 0.75)
    assert line(row) == "decode: 2 tokens/s; limit 4; ratio 0.500 (0.250 to 0.750), target at least 0.75: NO"


BLOCKED = """
import runpy, sys
from importlib.machinery import PathFinder
from pathlib import Path

ABSENT = {{"hydra", "omegaconf", "datasets", "wandb", "rich", "platformdirs", "tokenizers", "transformers", "pyarrow",
          "matplotlib", "scipy", "statsmodels", "huggingface_hub", "pandas"}}

class Here(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)
        return None if name == "softattn_lm" and found is not None and found.origin is None else found

# Nor is the checkout installed, whichever way: an editable one leaves a folder without code beside the others.
sys.meta_path = [Here if finder is PathFinder else finder for finder in sys.meta_path if isinstance(finder, type)]
sys.path = [folder for folder in sys.path if not Path(folder, "softattn_lm", "__init__.py").exists()]
assert Here.find_spec("softattn_lm") is None and "softattn_lm" not in sys.modules
sys.argv = ["benchmark.py", "gpu"]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_a_kernel_whose_gradient_is_no_number_is_wrong(monkeypatch):
    rows = benchmark_gpu.checks(torch.device("cpu"))
    assert len(rows) == 3 and all(row.reached for row in rows)

    right = Blockwise.forward

    def spoilt(*given, **more):
        y = right(*given, **more)
        y.register_hook(lambda gradient: gradient * float("nan"))
        return y

    monkeypatch.setattr(Blockwise, "forward", spoilt)
    assert [row.reached for row in benchmark_gpu.checks(torch.device("cpu"))] == [True, False, True]


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_needs_torch_and_lightning_only_and_a_checkout_that_is_not_installed(tmp_path):
    code = BLOCKED.format(script=str(SCRIPT))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "blockwise, beside formula: " in done.stdout and "graphed decoding, beside the model: " in done.stdout
    assert "allowed 0.0001" in done.stdout and "training 2 x 64" in done.stdout
    assert "decode, batch 1" in done.stdout and "a pass, chunks, layers twice: " in done.stdout
    compiled = "compiled graphed decoding, beside the model: " if shutil.which("g++") else "no C++ compiler works here"
    assert compiled in done.stdout and "training, vocabulary of " in done.stdout
    assert (tmp_path / "runs/benchmark/gpu.json").is_file()
    if not torch.cuda.is_available():
        assert "figures mean nothing" in done.stdout


def test_compiling_pays_after_as_many_steps_as_it_saves_its_seconds_in():
    assert break_even(10.0, 0.05, 0.04, 3000).endswith("after 1,000 steps, and this run has 3,000")
    assert "it does not pay; type training.compile=false" in break_even(10.0, 0.04, 0.05, 3000)
    said = break_even(10.0, 0.05, 0.04, 3000, "an optimizer step takes", "experiment=this")
    assert said.startswith("compiling took 10 s; an optimizer step takes 40.0 ms, and took 50.0: it pays for itself ")
    assert said.endswith(" after 1,000 steps, and experiment=this has 3,000")


@pytest.mark.slow
def test_a_run_that_cannot_be_compiled_ends_in_one_line(tmp_path):
    (tmp_path / "text.txt").write_text(timed.symbols(4000), encoding="ascii")
    words = ["trainer=cpu", "data=text_file", "data.path=text.txt", "model.n_layer=1", "model.d_model=16", "steps=2"]
    words += ["model.n_head=2", "model.context=16", "batch_size=4", "logger=none", "training.compile=true"]
    given = os.environ | {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}
    command = [sys.executable, "-m", "softattn_lm", "train", *words]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: training.compile=true: the model could not be compiled (InvalidCxxCompiler: ")
    assert "'/bin/false')" in line and line.endswith("g++, or type training.compile=false")


def test_what_fails_beside_the_compiler_is_no_fault_of_the_person():
    assert not_compiled(RuntimeError("shapes do not fit")) is None


@pytest.mark.slow
def test_a_compiled_run_says_when_it_pays_and_learns_what_an_eager_one_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back behind the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    console, run = Console(record=True, width=200, file=io.StringIO()), tmp_path / "runs" / "compiled"
    words = ("model.n_layer=1", "model.dropout=0.0", "data.val_fraction=0", "training.sample_every=null")
    words += ("training.loss_chunk=8",)  # many chunks, which are not compiled one by one
    cfg = tiny_config(tmp_path, *words, "training.compile=true", "name=compiled")
    train(cfg, new_run(cfg["runs"], cfg["name"], cfg), console=console)
    assert "compiling took " in console.export_text() and any((tmp_path / "runs/cache/compiled").iterdir())
    eager = losses(tiny_train(tmp_path, *words))
    assert losses(run) == pytest.approx(eager, abs=1e-4)
