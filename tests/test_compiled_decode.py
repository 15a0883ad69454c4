"""A decode step that torch.compile makes: its parts are other formulas, and what it writes stays written."""

import shutil
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from softattn_lm.commands import benchmark_gpu_decode
from softattn_lm.commands.bare_training import Shape
from softattn_lm.model.graphed import GraphedDecode
from softattn_lm.model.step_parts import CHUNK, Library, Reductions
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from tests.models import shaken, tiny_model

MODELS = {
    "llama": {"mlp": "swiglu", "n_kv_head": 2, "qk_norm": "rms_gain", "value_embeddings": True, "embed_norm": True},
    "gpt2": {"position": Learned, "norm": "layer", "bias": True, "mlp": "gelu_tanh", "tie_head": True},
    "attention alone": {"mlp": "none", "position": NoPosition, "final_cap": 2.0, "head_dim": 6},
}
WIDE = 4 * 129  # symbols: four chunks


def model(name: str):
    return shaken(tiny_model(vocab_size=WIDE, context=24, **MODELS[name])).eval()


def uncompiled(*given, **more) -> GraphedDecode:
    """The formulas that are made for a compiler, as they stand."""
    writer = GraphedDecode(*given, compiled=True, **more)
    writer.step = writer._step
    return writer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_parts_made_for_a_compiler_are_those_of_the_library(name, batch):
    made, close = model(name).double(), partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
    tokens = torch.randint(WIDE, (batch, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        writers = [GraphedDecode(made, batch), uncompiled(made, batch)]
        assert [type(writer.way) for writer in writers] == [Library, Reductions]
        for writer in writers:
            writer.write(tokens[:, :6], 10)  # buffers hold another text
            made(tokens[:1, :4], cache := made.new_cache())  # one with which all begin
            writer.resume(cache)
        for token in tokens[:, 4:].unbind(1):
            a, b = (writer(token) for writer in writers)
            close(b, a)
            assert torch.equal(writers[0].ids, writers[1].ids)


def test_the_likeliest_is_the_first_of_equals():
    for size in (3, CHUNK, WIDE, 521):  # the last is prime
        logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
        logits[0] = -torch.inf
        logits[1, [size - 1, size // 2]] = 9.0
        assert torch.equal(Reductions().likeliest(logits), logits.argmax(-1, keepdim=True))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize(("name", "inside"), [("llama", False), ("gpt2", True)])
def test_a_compiled_step_writes_what_the_plain_one_does(name, inside):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    made = model(name)
    tokens = torch.randint(WIDE, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode() if inside else nullcontext():  # whose tensors a compiler treats in another way
        plain, compiled = GraphedDecode(made), GraphedDecode(made, compiled=True)
    with torch.inference_mode():
        exact = made(tokens)
        for place, token in enumerate(tokens.unbind(1)):
            torch.testing.assert_close(compiled(token), exact[:, place], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(compiled.logits, plain(token), atol=1e-5, rtol=1e-5)
            assert torch.equal(compiled.ids, plain.ids) and compiled.position.item() == place + 1
    prompt = tokens[:, :3]
    assert torch.equal(compiled.write(prompt, 20), plain.write(prompt, 20))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # and no later step was compiled anew
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_graph_of_a_compiled_step_writes_what_the_plain_step_does_on_a_cpu(batch):
    torch.compiler.reset()
    made = model("gpt2")
    prompt = torch.tensor([[5, 9, 2]] * batch)
    expected = GraphedDecode(made, batch).write(prompt, 20)
    assert torch.equal(
        GraphedDecode(made.to("cuda"), batch, compiled=True).write(prompt.to("cuda"), 20).cpu(), expected
    )


def test_where_nothing_can_be_compiled_the_plain_graph_is_measured(monkeypatch, capsys):
    tiny, device = Shape(1, 64, 32, 1, 97), torch.device("cpu")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (row,) = benchmark_gpu_decode.decode(tiny, device, 2)
    assert row.what == "decode, batch 1, not compiled" and list(row.peers) == ["limit of bandwidth"]
    assert "g++ is not installed" in capsys.readouterr().out

    def failing(self):
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda step, **more: partial(failing, None))
    (row,) = benchmark_gpu_decode.decode(tiny, device, 2)
    assert row.what == "decode, batch 1, not compiled" and min(row.ours) > 0
    assert "the decode step does not compile: no kernel" in capsys.readouterr().out


def test_a_step_reads_all_weights_but_positions_and_the_whole_cache():
    made = model("gpt2")
    weights = sum(p.numel() for name, p in made.named_parameters() if not name.startswith("positions"))
    cache = 2 * 2 * 24 * 32  # layers, keys and values, context, width
    for writer in (GraphedDecode(made), uncompiled(made)):
        assert benchmark_gpu_decode.bytes_of_a_step(writer) == 4 * (weights + cache)
