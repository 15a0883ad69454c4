"""Benchmarks: ratios are taken within a repeat, figures are arithmetic on times, and all sides do the same work."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from softattn_lm.commands import (
    COMMANDS,
    benchmark,
    benchmark_attention,
    benchmark_generate,
    benchmark_loss,
    benchmark_train,
    limits,
    peers,
    peers_writing,
)
from softattn_lm.commands.comparison import Report, Row, interleaved, table_of
from softattn_lm.config.help import command_help
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError
from softattn_lm.model.generate import generate

FASTER = Row("a", "tokens/s", [10.0, 40.0, 30.0], {"peer": [5.0, 10.0, 20.0], "other": [1.0, 1.0, 1.0]}, "peer", 2.0)


def test_a_ratio_is_taken_within_a_repeat_and_its_median_is_reported():
    assert FASTER.ratios == [2.0, 4.0, 1.5]  # medians of each side would give 30 / 10
    assert (FASTER.ratio, FASTER.spread, FASTER.reached) == (2.0, (1.5, 4.0), True)


def test_where_less_is_better_the_ratio_is_still_ours_over_the_other_and_the_target_a_bound_from_above(capsys):
    """0.74 of the time of an import, of at most 1.6, was "1.35 of it" beside "0.625: yes"."""
    row = Row("start", "s", [7.4, 3.7], {"import": [10.0, 5.0]}, "import", 1.6, more_is_better=False)
    assert row.ratios == [0.74, 0.74] and row.reached is True
    Console(width=120).print(table_of([row]))
    said = capsys.readouterr().out
    assert "0.74 of import" in said and "at most 1.6: yes" in said
    held = row.as_dict()
    assert (held["ratio"], held["ratio_is"], held["target_is"]) == (0.74, "ours / import", "at most")
    slow = Row("start", "s", [9.0], {"import": [5.0]}, "import", 1.6, more_is_better=False)
    assert slow.reached is False and Row("a", "s", [1.0], {"peer": [1.0]}, "peer").reached is None


def test_what_is_not_the_same_work_misses_its_target_whatever_the_ratio():
    row = Row("a", "s", [1.0], {"peer": [9.0]}, "peer", 0.5, more_is_better=False, missed=True)
    assert row.ratio < 0.5 and row.reached is False


def test_a_limit_of_each_repeat_is_compared_within_it(capsys):
    row = Row("a", "tokens/s", [10.0, 90.0, 30.0], {"peer": [1.0] * 3}, "peer", limit=[11.0, 100.0, 60.0])
    assert row.of_limit == 0.9  # medians of each side would give 30 / 60
    Console(width=120).print(table_of([row]))
    said = capsys.readouterr().out
    assert "(90%)" in said and " 60 " in said


def test_rounds_are_interleaved_behind_one_that_warms_up():
    calls: list[str] = []

    def case(name: str):
        return lambda: calls.append(name) or float(len(calls))

    found = interleaved({"a": case("a"), "b": case("b")}, repeats=2)
    assert calls == ["a", "b"] * 3 and found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_table_says_what_was_missed(capsys):
    missed = Row("b", "tokens/s", [1.0], {"peer": [1.0]}, "peer", 2.0, limit=4.0)
    Console(width=120).print(table_of([FASTER, missed]))
    first, second = capsys.readouterr().out.split("a ", 1)[1].split("b ", 1)
    assert "at least 2: yes" in first and "1.5 to 4 " in first.replace("1.50 to 4.00", "1.5 to 4 ")
    assert "at least 2: NO" in second and "(25%)" in second


def test_the_file_holds_every_figure_and_what_it_depends_on(tmp_path):
    report = Report({"repeats": 3}, tmp_path / "x.json", Console(quiet=True))
    report.open()
    report.close([FASTER])
    held = json.loads((tmp_path / "x.json").read_text())
    assert held["rows"][0]["ours"] == FASTER.ours and held["rows"][0]["spread"] == [1.5, 4.0]
    assert held["machine"]["torch"] == torch.__version__ and held["machine"]["threads"] == torch.get_num_threads()
    assert held["command"] == shlex.join(sys.argv) and held["settings"] == {"repeats": 3}


def test_a_pipe_is_as_wide_as_a_table_needs_unless_it_is_told_otherwise(monkeypatch, tmp_path, capsys):
    """At 80 columns each row took up to eight lines."""
    what = "6 layers of 384: float32 1.5210, bfloat16 1.5231 after 500 steps"
    row = Row(what, "nats apart", [0.0021], {"allowed": [0.01]}, "allowed", 1.0, more_is_better=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    Report({}, tmp_path / "x.json").close([row])
    assert what in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    Report({}, tmp_path / "x.json").close([row])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_limits_are_operations_and_bytes_per_second(monkeypatch):
    monkeypatch.setattr(limits, "seconds_of", lambda step: 0.5)
    assert limits.gemm_rate(size=64) == 2 * 64**3 * 3 / 0.5
    assert limits.read_bandwidth(2**26) == 2**26 * 2 / 0.5  # read twice in a round


def test_a_topic_that_is_none_is_named_with_those_there_are():
    with pytest.raises(UserError, match=r"attention.*generate.*; 'speed' came"):
        benchmark.run({}, ["speed"])


def test_the_help_lists_every_topic_and_which_of_them_each_setting_is_of():
    """Only the first topic was there, and `heads` was said to be of it alone."""
    said = command_help(config_folder(), COMMANDS["benchmark"], [])
    topics = [line.partition(":")[0].split()[1] for line in said.splitlines() if line.startswith("benchmark.py ")]
    assert topics == list(benchmark.TOPICS)
    for key in ("heads", "head_dim", "lengths", "window"):
        assert any(line.startswith(f"  {key}=") and "attention, cache: " in line for line in said.splitlines())


def test_a_setting_that_a_topic_does_not_read_is_refused():
    with pytest.raises(UserError, match=r"^benchmark train does not read text=novel\.txt; time_to_loss would$"):
        benchmark.run({"text": "novel.txt"}, ["train"])
    with pytest.raises(UserError, match=r"cache does not read repeats=2; attention, generate, train, loss, "):
        benchmark.run({"repeats": 2}, ["cache"])


def test_the_comments_of_the_settings_name_the_topics_that_read_them():
    lines = (config_folder() / "benchmark.yaml").read_text(encoding="utf-8").splitlines()
    said = {line.partition(":")[0]: line.partition("  # ")[2] for line in lines if not line.startswith("#")}
    for name in set(vars(BenchmarkSettings())) - {"runs"}:
        readers = [topic for topic, read in benchmark.TOPICS.items() if name in read]
        assert sorted(said[name].partition(":")[0].split(", ")) == sorted(readers), name


def test_lengths_without_a_target_give_no_empty_table_of_verdicts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark_attention, "_memory_of", lambda name, length, settings: 2**20)
    monkeypatch.setattr(benchmark_attention, "_times", lambda length, settings: {"formula": [0.5]})
    benchmark_attention.benchmark(BenchmarkSettings(lengths=[512]), tmp_path / "attention.json")
    said = capsys.readouterr().out
    assert "T=512" in said and "at least" not in said and "least to most │" not in said


@pytest.mark.parametrize("of", [benchmark_train, benchmark_generate])
def test_what_is_missing_is_installed_from_the_checkout(monkeypatch, tmp_path, of):
    """A package of this name elsewhere may be a stranger's."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UserError, match=r"in the checkout, type: pip install -c \.ci/constraints\.txt -e '\.\[bench\]'$"
    ):
        of.benchmark(BenchmarkSettings(), tmp_path / "x.json")


def test_the_limit_of_decoding_is_measured_in_every_round_and_halves_are_labelled(monkeypatch):
    monkeypatch.setattr(benchmark_generate, "_rate", lambda run, tokens: 10.0)
    monkeypatch.setattr(peers, "transformers_gpt2", lambda shape: torch.nn.Linear(2, 2))
    monkeypatch.setattr(peers_writing, "transformers_writers", lambda *given: {"transformers": lambda: None})
    written: list[torch.dtype] = []  # of the models that write
    monkeypatch.setattr(peers_writing, "transformers_writer", lambda model, *given: written.append(model.weight.dtype))
    measured: list[int] = []
    monkeypatch.setattr(benchmark_generate, "read_bandwidth", lambda n: measured.append(n) or n * 10.0 * len(measured))
    case = benchmark_generate.Case(1, 128, 2, 1.0, half=True)
    row = benchmark_generate._compare(case, Report({}, Path("x.json")), 2)
    assert row.limit == [40.0, 60.0]  # tokens/s of a batch of two; the first round warmed up
    assert row.what == "1 x 128, batch 2, ours in bfloat16" and "limit" not in row.peers
    assert list(row.peers) == ["transformers", "transformers, bfloat16", "bare loop"] and written == [torch.bfloat16]
    whole = benchmark_generate.bytes_read(benchmark_generate.gpt2_style(1, 128), 2)
    assert measured[0] == whole / 2


@pytest.mark.parametrize("batch", [1, 3])
def test_the_bare_loop_writes_what_the_model_writes(monkeypatch, batch):
    monkeypatch.setattr(benchmark_generate, "NEW", 40)
    model = benchmark_generate.gpt2_style(2, 128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than a start's 0.02, or one token would be repeated for ever.
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    ours = list(generate(model, [1] * benchmark_generate.PROMPT, max_new_tokens=40, temperature=0, n=batch))
    assert benchmark_generate.bare_loop(model, batch).t().tolist() == ours
    assert len({step[0] for step in ours}) > 1


def test_every_way_of_the_loss_is_the_same_loss_and_is_measured(monkeypatch, tmp_path, capsys):
    losses = [benchmark_loss.step(way, 300, 20)().item() for way in benchmark_loss.WAYS]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5) and len(losses) >= 2
    monkeypatch.setattr(benchmark_loss, "CASES", [(2000, 200)])
    monkeypatch.setattr(benchmark_loss, "_memory_of", lambda way, *case: 2**20 * len(way))
    benchmark_loss.benchmark(BenchmarkSettings(repeats=2), tmp_path / "loss.json")
    rows = json.loads((tmp_path / "loss.json").read_text())["loss"]
    assert [row["way"] for row in rows] == list(benchmark_loss.WAYS) and all(len(row["seconds"]) == 2 for row in rows)
    said = capsys.readouterr().out
    assert "2,000, 200" in said and " 6 " in said  # MiB of "chunks"


def no_compiler():
    raise RuntimeError("InvalidCxxCompiler: none\n\nand a lot more about it")


@pytest.mark.slow
def test_generate_compares_all_sides_and_writes_the_file(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(benchmark_generate, "NEW", 6)
    monkeypatch.setattr(benchmark_generate, "SHORT", 10)
    monkeypatch.setattr(benchmark_generate, "LONG", 80)
    cases = [benchmark_generate.Case(1, 128, batch, 0.001) for batch in (2, 1)]
    cases += [cases[1]._replace(target=None, llama=True, one_thread=True), cases[1]._replace(half=True)]
    monkeypatch.setattr(benchmark_generate, "CASES", cases)
    monkeypatch.setattr(peers_writing, "_compiled", no_compiler)  # compiling takes seconds
    monkeypatch.setitem(sys.modules, "litgpt", None)
    pytest.importorskip("x_transformers")
    benchmark_generate.benchmark(BenchmarkSettings(repeats=2), tmp_path / "generate.json")
    held = json.loads((tmp_path / "generate.json").read_text())
    long, *rows = held["rows"]
    ways = ["transformers", "transformers, static cache"]
    several, one, llama, half = (list(row["peers"]) for row in rows)
    assert several == [*ways, "bare loop"] and half == [*ways, "transformers, bfloat16", "bare loop"]
    assert one == [*ways, "x-transformers", "bare loop"] and llama == [*ways, "transformers, one thread"]
    assert all(len(rates) == 2 and min(rates) > 0 for row in rows for rates in [row["ours"], *row["peers"].values()])
    assert rows[0]["reached"] and long["against"] == "10 tokens"
    assert rows[2]["what"] == "Llama-style 1 x 128, batch 1" and rows[2]["target"] is None
    assert list(held["left_out"]) == ["litgpt", "transformers, static cache, compiled"]
    said = capsys.readouterr().out
    assert "0.001: yes" in said and said.count("is left out (InvalidCxxCompiler: none); it needs a C++ ") == 1
