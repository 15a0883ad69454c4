"""Peers of the benchmarks: models of the same size that compute the same, and as many tokens from each."""

import io
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console

from softattn_lm.commands import bare_training, peers, peers_writing
from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.comparison import Report
from tests.peer_weights import from_litgpt, from_llama, from_x_transformers, moved

TINY = Shape(2, 128, 16, 4)
PINS = Path(__file__).parents[1] / ".ci" / "constraints.txt"

# Name -> (module it needs, its builder, ours, how weights are taken over, parameters that ours has and it has not).
# x-transformers has no bias in four projections of a layer nor in any norm.
PEERS = {
    "llama": ("transformers", peers.transformers_llama, bare_training.llama_style, from_llama, 0),
    "litgpt": ("litgpt", peers.litgpt_llama, bare_training.llama_style, from_litgpt, 0),
    "x-transformers": (
        "x_transformers",
        peers.x_transformers_gpt2,
        bare_training.gpt2_style,
        from_x_transformers,
        TINY.layers * 4 * TINY.width + (2 * TINY.layers + 1) * TINY.width,
    ),
}


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_of_our_size_and_with_its_weights_ours_gives_its_logits(name):
    module, build, our_build, take_over, fewer = PEERS[name]
    pytest.importorskip(module, reason=f"{name} is not installed")
    torch.manual_seed(0)
    theirs, ours = moved(build(TINY)), our_build(TINY).eval()
    assert parameters(theirs) == parameters(ours) - fewer
    take_over(ours, theirs)
    idx = torch.randint(TINY.vocabulary, (3, TINY.context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = peers.logits_of(theirs)(idx) if name == "llama" else theirs(idx)
        torch.testing.assert_close(ours(idx), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [TINY, Shape(1, 384, 16, 4)])
def test_peers_of_transformers_have_as_many_parameters_as_ours(shape):
    pytest.importorskip("transformers")
    assert parameters(peers.transformers_gpt2(shape)) == parameters(bare_training.gpt2_style(shape))
    assert parameters(peers.transformers_llama(shape)) == parameters(bare_training.llama_style(shape))


def test_a_library_that_is_not_there_is_left_out_in_one_line_that_says_what_to_type(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    for module in ("litgpt", "x_transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    console = Console(record=True, width=200, file=io.StringIO())
    report = peers.opened("train", Report({}, tmp_path / "x.json", console))
    said = console.export_text().splitlines()
    assert report.found["left_out"] == peers.left_out() and list(peers.left_out()) == ["litgpt", "x-transformers"]
    lit, x = (next(line for line in said if line.startswith(f"{name} is left out (")) for name in peers.OPTIONAL)
    assert lit.endswith("type: pip install -c .ci/constraints.txt --no-deps litgpt psutil jsonargparse")
    assert x.endswith("type: pip install -c .ci/constraints.txt -e '.[bench]'")
    for llama in (False, True):
        prompt = torch.ones(1, 4, dtype=torch.long)
        assert peers.of_others(TINY, llama) == {} == peers_writing.other_writers(TINY, prompt, 3, llama)


def test_a_peer_stands_beside_the_models_of_its_own_style(monkeypatch):
    monkeypatch.setattr(peers, "left_out", dict)
    monkeypatch.setattr(peers_writing, "left_out", dict)
    for name in ("litgpt_llama", "x_transformers_gpt2"):
        monkeypatch.setattr(peers, name, lambda shape: torch.nn.Linear(2, 2))
    for name in ("litgpt_writer", "x_transformers_writer"):
        monkeypatch.setattr(peers_writing, name, lambda *given: print)
    for llama, expected in ((False, ["x-transformers"]), (True, ["litgpt"])):
        writers = peers_writing.other_writers(TINY, torch.ones(1, 4, dtype=torch.long), 3, llama)
        assert list(peers.of_others(TINY, llama)) == list(writers) == expected


@pytest.mark.skipif(not PINS.is_file(), reason="this is no checkout")
def test_what_is_typed_for_litgpt_is_pinned():
    pinned = {line.partition("==")[0] for line in PINS.read_text(encoding="utf-8").splitlines()}
    assert set(peers.OPTIONAL["litgpt"][1].partition("--no-deps ")[2].split()) <= pinned


def uncompiled():
    """A report in which nothing is compiled any more, which takes seconds."""
    return Report({}, Path("x.json"), Console(quiet=True), {"left_out": {peers_writing.COMPILED: "it takes seconds"}})


WRITERS = {
    "transformers": lambda prompt: list(
        peers_writing.transformers_writers(peers.transformers_gpt2(TINY), prompt, 5, uncompiled()).values()
    ),
    "litgpt": lambda prompt: [peers_writing.litgpt_writer(TINY, prompt, 5)],
    "x_transformers": lambda prompt: [peers_writing.x_transformers_writer(TINY, prompt, 5)],
}
GENERATE = {
    "transformers": ("transformers", "GPT2LMHeadModel"),
    "litgpt": ("litgpt.generate.base", None),
    "x_transformers": ("x_transformers", "AutoregressiveWrapper"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_of_another_length_is_no_time(monkeypatch, name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    prompt = torch.ones(1, 4, dtype=torch.long)
    writers = WRITERS[name](prompt)
    for write in writers:
        write()
    module, owner = GENERATE[name]
    holder = import_module(module) if owner is None else getattr(import_module(module), owner)
    whole = holder.generate
    monkeypatch.setattr(holder, "generate", lambda *given, **more: whole(*given, **more)[..., :-1])
    for write in WRITERS[name](prompt):
        with pytest.raises(AssertionError, match="Size"):
            write()
    assert len(writers) == (2 if name == "transformers" else 1)


def test_a_static_cache_that_cannot_be_compiled_is_tried_once_and_compared_as_it_is(monkeypatch, tmp_path):
    """With g++ on the path that compiled nothing, the whole benchmark was lost."""
    transformers = pytest.importorskip("transformers")
    whole, compiling = transformers.GPT2LMHeadModel.generate, []

    def generate(*given, compile_config=None, **more):
        if compile_config is not None:
            compiling.append(compile_config)
            raise RuntimeError("InvalidCxxCompiler: none that works\n\nSet TORCHDYNAMO_VERBOSE=1")
        return whole(*given, **more)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", generate)
    console = Console(record=True, width=80, file=io.StringIO())
    report = Report({}, tmp_path / "x.json", console, {"left_out": {}})
    prompt = torch.ones(1, 4, dtype=torch.long)
    for _ in range(2):
        writers = peers_writing.transformers_writers(peers.transformers_gpt2(TINY), prompt, 5, report)
        assert list(writers) == ["transformers", "transformers, static cache"]
        writers["transformers, static cache"]()
    assert len(compiling) == 1
    (line,) = console.export_text().splitlines()
    assert line == report.found["left_out"]["transformers, static cache, compiled"]
    assert "compiled is left out (InvalidCxxCompiler: none that works); it needs a C++ compiler" in line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_static_cache_that_was_compiled_says_so():
    pytest.importorskip("transformers")
    report = Report({}, Path("x.json"), Console(quiet=True), {"left_out": {}})
    prompt = torch.ones(1, 4, dtype=torch.long)
    writers = peers_writing.transformers_writers(peers.transformers_gpt2(TINY), prompt, 5, report)
    assert list(writers) == ["transformers", "transformers, static cache, compiled"]
    assert report.found["left_out"] == {}
    torch.compiler.reset()


def test_one_thread_is_taken_for_a_call_only_even_if_it_fails():
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        peers_writing.in_one_thread(lambda: seen.append(torch.get_num_threads()))()
        assert (seen, torch.get_num_threads()) == ([1], 2)
        with pytest.raises(ZeroDivisionError):
            peers_writing.in_one_thread(lambda: 1 / 0)()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
