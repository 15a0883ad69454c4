"""Different layers, different policies: attention, mask and position by one mechanism; what does not go together."""

import re
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.kernels.topk import TopK
from softattn_lm.attention.kernels.uniform import Uniform
from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.visibility import Causal
from softattn_lm.config.build import build
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.patterns import expand_patterns
from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model

FIRST = Pattern(["uniform", "uniform", "sdpa"], [Uniform, Uniform, SDPA])


def test_a_pattern_of_kernels_repeats_over_the_layers():
    model = tiny_model(FIRST, n_layer=5)
    assert [type(block.attention.kernel) for block in model.blocks] == [Uniform, Uniform, SDPA, Uniform, Uniform]


def test_three_short_windows_and_a_long_one():
    short, long = Causal(4), Causal()
    model = tiny_model(mask=Pattern(list("SSSL"), [short, short, short, long]), n_layer=6)
    assert model.masks == [short, short, short, long, short, short]
    idx = torch.randint(11, (1, 16), generator=torch.Generator().manual_seed(0))
    _, weights = shaken(model).eval()(idx, return_weights=True)
    assert [int((a[0, 0, -1] > 0).sum()) for a in weights] == [4, 4, 4, 16, 4, 4]


def test_positions_may_alternate_and_only_their_layers_turn_or_add():
    model = tiny_model(position=Pattern(["rotary", "none", "alibi"], [Rotary, NoPosition, ALiBi]), n_layer=4)
    given = model._given(range(4), 0, 4, None, None, torch.device("cpu"))
    assert [g.rotation is not None for g in given] == [True, False, False, True]
    assert [g.bias is not None for g in given] == [False, False, True, False]


@pytest.mark.parametrize("chunks", [[1] * 40, [9, 1, 16, 14]])
def test_decoding_with_everything_mixed_equals_the_full_pass(chunks):
    masks = Pattern(["a", "b", "c"], [Causal(4), Causal(3, sinks=2), Causal()])
    positions = Pattern(["rotary", "none"], [Rotary, NoPosition])
    model = shaken(tiny_model(FIRST, mask=masks, position=positions, n_layer=6, n_kv_head=2, smear=True)).eval()
    idx = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model.new_cache()
        cached = torch.cat([model(part, cache) for part in idx.split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(cached, model(idx), atol=2e-5, rtol=2e-5)


def test_positions_of_the_input_do_not_alternate():
    with pytest.raises(UserError, match=r"position\.pattern mixes policies per layer"):
        tiny_model(position=Pattern(["learned", "none"], [Learned, NoPosition]))


def test_an_empty_pattern_is_refused():
    with pytest.raises(UserError, match="at least one policy"):
        Pattern([], [])


@pytest.mark.parametrize("position", [ALiBi, Pattern(["none", "alibi"], [NoPosition, ALiBi])])
def test_a_kernel_without_scores_refuses_a_bias_and_names_its_layer(position):
    with pytest.raises(UserError, match=r"Uniform of layer 1 cannot honour position=alibi: it has no scores"):
        tiny_model(Pattern(["sdpa", "uniform"], [SDPA, Uniform]), position=position)


def test_a_kernel_refuses_masks_that_it_says_it_cannot_honour():
    class Stubborn(SDPA):
        refuses: ClassVar = {"window": "no window", "sinks": "no sinks", "documents": "no documents"}

    tiny_model(Stubborn)
    for mask, reason in ((Causal(4), "window"), (Causal(documents=True), "documents"), (Causal(4, sinks=1), "window")):
        with pytest.raises(UserError, match=rf"Stubborn of layer 0 cannot honour mask\.{reason}: no {reason}"):
            tiny_model(Stubborn, mask=mask)


def test_a_refusal_of_dropout_names_the_setting_of_the_model():
    class Dry(Uniform):
        refuses: ClassVar = {"dropout": "nothing is dropped"}

    tiny_model(partial(Dry, dropout=0.0))
    with pytest.raises(UserError, match=r"Dry of layer 0 cannot honour model\.dropout: nothing is dropped"):
        tiny_model(partial(Dry, dropout=0.1))


def test_packed_documents_need_a_mask_that_keeps_them_apart_in_every_layer():
    idx = torch.zeros(1, 4, dtype=torch.int64)
    for mask in (Causal(), Pattern(["documents", "causal"], [Causal(documents=True), Causal()])):
        with pytest.raises(UserError, match="type mask=documents"):
            tiny_model(mask=mask)(idx, documents=idx)
    model = tiny_model(mask=Causal(4, sinks=1, documents=True))
    with pytest.raises(UserError, match=r"decode packed documents with mask\.sinks=0"):
        model(idx, model.new_cache(), documents=idx)


# -- from a config -----------------------------------------------------------------------------------------------------


def expanded(group: str, **node):
    from omegaconf import OmegaConf

    base = {"pattern": ["sdpa"], "letters": {}, "options": {}, "layers": []}
    composed = OmegaConf.create({group: {**base, **node}})
    expand_patterns(composed, Path("configs"))
    return OmegaConf.to_container(composed, resolve=False)[group]


def test_names_become_the_nodes_of_their_files_with_options_on_top():
    node = expanded("attention", pattern=["uniform", "topk"], options={"topk": {"top": 3}})
    assert node["pattern"] == ["uniform", "topk"] and set(node) == {"pattern", "layers"}
    assert [layer["_target_"].rpartition(".")[2] for layer in node["layers"]] == ["Uniform", "TopK"]
    assert node["layers"][1]["top"] == 3


def test_a_word_is_spelled_by_its_letters():
    letters = {"S": "sliding", "L": "causal"}
    node = expanded("mask", pattern="SSSL", letters=letters, options={"sliding": {"window": 8}})
    assert node["pattern"] == ["sliding"] * 3 + ["causal"]
    assert [layer["window"] for layer in node["layers"]] == [8, 8, 8, None]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"pattern": ["unifrom", "sdpa"]}, r"attention\.pattern names unifrom, .*uniform"),
        ({"pattern": "SX", "letters": {"S": "sdpa"}}, r"attention\.pattern has the letter X; there are S for sdpa"),
        ({"pattern": "S"}, "give a list of names"),
        ({"pattern": ["sdpa"], "options": {"topk": {"top": 3}}}, r"attention\.options\.topk sets what .* does not use"),
    ],
)
def test_what_a_pattern_cannot_mean_is_refused_by_name(node, message):
    with pytest.raises(UserError, match=message):
        expanded("attention", **node)


HYBRID = ["attention=pattern", "attention.pattern=[delta,delta,delta,sdpa]", "model.n_layer=4"]


def hybrid(*typed):
    """As `train` composes, checks and builds it; a fault of any of them is one UserError."""
    cfg = check(compose("train", [*HYBRID, "data=tiny_shakespeare", *typed], config_folder()), "TrainSettings")
    return build(cfg["model"], vocab_size=11, seed=0)


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        # Its advice was attention.dropout=0, which a pattern has not.
        (["model.dropout=0.1"], "in a pattern +attention.options.delta.dropout=0"),
        (["model.dropout=0.1", "attention.dropout=0"], "type +attention.options.delta.dropout=0 or +attention.options"),
        (["attention.gate=true"], "type +attention.options.delta.gate=true"),
        (["attention.options.delta.gate=true"], "type +attention.options.delta.gate=true"),
    ],
)
def test_what_a_pattern_refuses_it_says_how_to_type_and_that_works(typed, advice):
    with pytest.raises(UserError, match=re.escape(advice)):
        hybrid(*typed)
    option = re.search(r"\+attention\.options\S+", advice)
    assert option is not None
    taken = "attention.dropout=0", "attention.gate=true", "attention.options.delta.gate=true"
    model = hybrid(*(word for word in typed if word not in taken), option[0])
    kernels = [block.attention.kernel for block in model.layers]
    assert [kernel.dropout for kernel in kernels] == [0, 0, 0, 0.1 if "model.dropout=0.1" in typed else 0]
    assert all((kernel.alpha is not None) == ("gate" in option[0]) for kernel in kernels[:3])


def test_a_setting_of_no_choice_is_still_unknown_in_a_pattern():
    with pytest.raises(UserError, match=r"unknown setting attention\.foo"):
        hybrid("attention.foo=1")


def test_options_of_a_layer_reach_its_kernel():
    model = tiny_model(Pattern(["topk", "topk"], [partial(TopK, top=1), partial(TopK, top=2)]))
    idx = torch.randint(11, (1, 9), generator=torch.Generator().manual_seed(0))
    _, weights = shaken(model).eval()(idx, return_weights=True)
    assert [int((a[0, 0, -1] > 0).sum()) for a in weights] == [1, 2]
