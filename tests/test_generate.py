"""Sampling: the same text with and without the cache, exactly as many tokens as asked, in constant memory."""

from functools import partial

import pytest
import torch

from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.visibility import Causal
from softattn_lm.errors import UserError
from softattn_lm.model.generate import choose, generate
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model

RICH = {"smear": True, "value_embeddings": True, "n_kv_head": 2, "qk_norm": "rms"}


@pytest.mark.parametrize("length", [1, 6, 40])
@pytest.mark.parametrize("mask", [Causal(), Causal(5)])
@pytest.mark.parametrize("position", [Rotary, Learned, NoPosition])
@pytest.mark.parametrize("kernel", [SDPA, Formula])
def test_greedy_ids_are_identical_with_and_without_the_cache_over_three_contexts(kernel, position, mask, length):
    model = shaken(tiny_model(kernel, position=position, mask=mask, **RICH), seed=3)
    prompt = torch.randint(11, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    ways = [{"use_cache": True}, {"use_cache": True, "flat": False}, {"use_cache": False}]
    texts = [list(generate(model, prompt, max_new_tokens=48, temperature=0, **way)) for way in ways]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 48
    assert len({ids[0] for ids in texts[0]}) > 1  # a constant text would prove nothing


def test_beyond_the_context_a_relative_model_reads_exactly_its_window():
    # One layer and no position: the last logits depend on the last `context` tokens and on nothing before.
    model = shaken(tiny_model(n_layer=1, position=NoPosition))
    text = torch.randint(11, (40,)).tolist()
    other = [(token + 1) % 11 for token in text[:24]] + text[24:]
    first, second = (list(generate(model, ids, max_new_tokens=1, temperature=0)) for ids in (text, other))
    assert first == second
    nearer = [*text[:24], (text[24] + 1) % 11, *text[25:]]
    cache, other_cache = model.new_cache(), model.new_cache()
    for part, changed in zip(torch.tensor([text]).split(16, 1), torch.tensor([nearer]).split(16, 1), strict=True):
        a, b = model(part, cache), model(changed, other_cache)
    assert not a[:, -1].isclose(b[:, -1]).all()


def test_the_cache_does_not_grow_with_the_number_of_new_tokens():
    model = shaken(tiny_model(**RICH)).eval()
    cache, sizes = model.new_cache(), []
    with torch.inference_mode():
        for _ in range(1200):
            model(torch.tensor([[1]]), cache)
            sizes.append(cache.nbytes())
    assert cache.length == 1200 and set(sizes) == {sizes[0]}


def test_streams_of_a_cache_are_half_as_wide_with_half_the_groups():
    sizes = []
    for groups in (4, 2):
        sizes.append(tiny_model(n_kv_head=groups).cache_bytes_per_token())
    assert sizes == [2 * 2 * 32 * 4, 2 * 2 * 16 * 4]  # layers · (k and v) · width · bytes


def test_a_sample_depends_on_its_seed_and_number_and_not_on_how_many_there_are():
    model = shaken(tiny_model())
    three = list(zip(*generate(model, [1], max_new_tokens=20, n=3, seed=5), strict=True))
    one = list(zip(*generate(model, [1], max_new_tokens=20, n=1, seed=5), strict=True))
    assert three[0] == one[0] and len(set(three)) == 3
    assert one != list(zip(*generate(model, [1], max_new_tokens=20, seed=6), strict=True))


def test_sampling_follows_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    uniform = torch.rand(20000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = choose(logits.expand(20000, 3), uniform, temperature=0.5).bincount(minlength=3) / 20000
    torch.testing.assert_close(counts, (logits[0] / 0.5).softmax(-1), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 0.41}, {0, 1}),
        ({"top_k": 3, "min_p": 0.41}, {0, 1}),
    ],
)
def test_filters_keep_the_tokens_worked_out_by_hand(settings, kept):
    logits = torch.tensor([0.5, 0.25, 0.17, 0.08]).log().expand(4000, 4)
    uniform = torch.rand(4000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert set(choose(logits, uniform, 1.0, **settings).tolist()) == kept


def test_sampling_leaves_the_mode_of_the_model_and_the_global_generator_alone():
    model = shaken(tiny_model(dropout=0.5)).train()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first = list(generate(model, [1], max_new_tokens=5))
    assert torch.rand(1).equal(expected) and model.training
    assert first == list(generate(model, [1], max_new_tokens=5))


@pytest.mark.parametrize("more", [{}, {"flat": False}, {"use_cache": False}])
def test_texts_that_are_written_in_turn_do_not_end_each_others_mode(more):
    model = shaken(tiny_model(dropout=0.5)).train()
    write = partial(generate, model, [1], max_new_tokens=6, temperature=0, **more)
    expected = list(write())
    one, other = write(), write()
    next(one)
    found = [next(other)]
    one.close()
    assert model.training and found + list(other) == expected and model.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 0.0}, "min_p=0.0"),
        ({"n": 0}, "n=0"),
    ],
)
def test_senseless_settings_are_refused_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        list(generate(tiny_model(), [1], **{"max_new_tokens": 1, **settings}))


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="prompt is empty"):
        list(generate(tiny_model(), [], max_new_tokens=1))
