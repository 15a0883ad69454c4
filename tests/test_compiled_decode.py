"""A decode step that torch.compile makes: its parts are other formulas, and what it writes stays written."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from softattn_lm.commands import benchmark_gpu, benchmark_gpu_decode
from softattn_lm.commands.agreement import TOLERANCE
from softattn_lm.errors import UserError
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
    writer = GraphedDecode(made.to("cuda"), batch, compiled=True)
    assert writer.position.item() == 0  # though steps warmed up
    assert torch.equal(writer.write(prompt.to("cuda"), 20).cpu(), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a compiler on CUDA")
def test_where_nothing_can_be_compiled_the_plain_graph_is_measured_and_the_failure_told(monkeypatch, capsys, tmp_path):
    for part in ("checks", "training", "saving", "vocabulary"):
        monkeypatch.setattr(benchmark_gpu, part, lambda device: [])
    file = tmp_path / "gpu.json"

    def measured() -> dict[str, Any]:
        found = json.loads(file.read_text())
        (row,) = found["rows"]
        assert row["what"] == "decode, batch 1, not compiled" and min(row["ours"]) > 0
        assert list(row["peers"]) == ["limit of reading weights and what the cache holds"]
        return found

    def failing(said):
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "compile", lambda step, **more: partial(failing, "InvalidCxxCompiler: none\nat all"))
    benchmark_gpu.main(file)  # which is no failure of a CPU
    found, reason = measured(), "the compiled decode step is left out, as no C++ compiler works here"
    assert found["left_out"] == [reason] and not found["failed"] and f"\n{reason}\n" in capsys.readouterr().out

    monkeypatch.setattr(torch, "compile", lambda step, **more: partial(failing, "no\nkernel"))
    with pytest.raises(UserError, match=r"there went wrong: decoding$"):
        benchmark_gpu.main(file)
    assert (
        measured()["failed"] == {"decoding": "no\nkernel"} and "decoding failed: no kernel\n" in capsys.readouterr().out
    )


def test_a_step_has_to_read_all_weights_but_positions_and_the_tokens_before_it():
    made = model("gpt2")
    weights = sum(p.numel() for name, p in made.named_parameters() if not name.startswith("positions"))
    of_a_token = 2 * 2 * 32  # layers, keys and values, width
    for writer in (GraphedDecode(made), uncompiled(made)):
        for steps, before in ((1, 0), (2, 1), (4, 0 + 1 + 2 + 3), (24, sum(range(24)))):
            read = benchmark_gpu_decode.bytes_of_a_step(writer, steps) * steps
            assert read == pytest.approx(4 * (steps * weights + before * of_a_token), rel=1e-12)


def shifted(writer, change):
    """Attention of what `change` makes of q, keys, values, seen and scale."""
    right = writer.way.read
    writer.way.read = lambda *given: right(*change(*given))


FAULTS = {
    "a scale of 1": lambda w: setattr(w, "scales", [1.0] * 2),
    "a scale of 1 / D": lambda w: setattr(w, "scales", [scale**2 for scale in w.scales]),
    "the cache is seen whole": lambda w: shifted(w, lambda q, k, v, seen, s: (q, k, v, seen | True, s)),
    "the first is not seen": lambda w: shifted(w, lambda q, k, v, seen, s: (q, k, v, seen & hide(seen), s)),
    "heads are mixed": lambda w: shifted(w, lambda q, k, v, seen, s: (q.roll(1, 1), k, v, seen, s)),
    "keys are read as values": lambda w: shifted(w, lambda q, k, v, seen, s: (q, k, k, seen, s)),
    "layers share a cache": lambda w: setattr(w, "cache", w.cache[:1] * 2),
    "positions begin at 1": lambda w: setattr(w, "codes", w.codes.roll(-1, 0)),
    "no positions": lambda w: setattr(w, "codes", None),
    "no biases": lambda w: setattr(
        w, "_linear", lambda linear, x, norm=None: w.way.product(x, norm, linear.weight, None)
    ),
}


def hide(seen):
    """All but the first, which the first token cannot do without."""
    return torch.arange(len(seen)) >= min(1, seen.sum().item() - 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_step_is_further_from_the_model_than_is_allowed_on_cuda(fault, monkeypatch):
    class Faulty(GraphedDecode):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            FAULTS[fault](self)

    (right,) = benchmark_gpu.step_check(torch.device("cpu")).ours
    monkeypatch.setattr(benchmark_gpu, "GraphedDecode", Faulty)
    (wrong,) = benchmark_gpu.step_check(torch.device("cpu")).ours
    assert right < 1e-5 and wrong > 1.5 * TOLERANCE


@pytest.mark.parametrize("prompt", [(1, 3), (3, 3), (2, 0), (2, 20)])
def test_a_text_of_another_shape_is_not_written(prompt):
    writer = GraphedDecode(tiny_model(), batch=2)
    with pytest.raises(AssertionError, match=r"torch.Size\(\["):
        writer.write(torch.zeros(prompt, dtype=torch.long), 5)
    with pytest.raises(AssertionError, match=r"torch.Size\(\[3\]\), torch.Size\(\[2, 1\]\)"):
        writer(torch.zeros(3, dtype=torch.long))


@torch.inference_mode()
def test_a_token_behind_the_context_is_refused_before_it_is_read():
    writer, token = GraphedDecode(tiny_model(context=4), batch=2), torch.zeros(2, dtype=torch.long)
    for _ in range(2):
        for _ in range(4):
            writer(token)
        with pytest.raises(AssertionError, match=r"\(4, 4\)"):
            writer(token)
        assert writer.position.item() == 4
        writer.go_to(0)
