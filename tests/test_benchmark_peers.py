"""Peers of the benchmarks: models of the same size that compute the same, and as many tokens from each."""

import io
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console

from softattn_lm.commands import bare_training, peers, peers_writing
from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.comparison import Report
from softattn_lm.position.rotary import Rotary
from tests.peer_weights import from_litgpt, from_llama, from_x_transformers, moved

TINY = Shape(2, 128, 16, 4)
PINS = Path(__file__).parents[1] / ".ci" / "constraints.txt"

# Name -> (module it needs, its builder, ours, how weights are taken over, parameters that ours has and it has not).
# x-transformers has no bias in four projections of a layer nor in any norm.
PEERS = {
    "llama": ("transformers", peers.transformers_llama, bare_training.llama_style, from_llama, 0),
    "litgpt": ("litgpt", peers.litgpt_gpt2, lambda shape: bare_training.gpt2_style(shape, Rotary), from_litgpt, 0),
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
    assert peers.of_others(TINY) == {} == peers_writing.other_writers(TINY, torch.ones(1, 4, dtype=torch.long), 3)


@pytest.mark.skipif(not PINS.is_file(), reason="this is no checkout")
def test_what_is_typed_for_litgpt_is_pinned():
    pinned = {line.partition("==")[0] for line in PINS.read_text(encoding="utf-8").splitlines()}
    assert set(peers.OPTIONAL["litgpt"][1].partition("--no-deps ")[2].split()) <= pinned


WRITERS = {
    "transformers": lambda prompt: list(
        peers_writing.transformers_writers(peers.transformers_gpt2(TINY), prompt, 5).values()
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
    monkeypatch.setattr(peers_writing.shutil, "which", lambda name: None)  # compiling takes seconds
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
