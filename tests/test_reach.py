"""How far a logit reaches: back to the edge of all windows together and no farther, and never into another row."""

import pytest
import torch

from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.visibility import Causal
from softattn_lm.position.none import NoPosition
from tests.models import shaken, tiny_model

SHAPES = {
    # Each layer reads window − 1 tokens farther back, the look-back one more.
    "context": ({}, 15 + 15 + 1),
    "windows": ({"mask": Causal(5)}, 4 + 4 + 1),
    "windows that differ": ({"mask": Pattern(["short", "long"], [Causal(3), Causal(8)])}, 2 + 7 + 1),
    "look-back": ({"mask": Causal(5), "smear": True}, 4 + 4 + 1 + 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_logit_depends_on_its_receptive_field_and_on_nothing_before(shape):
    settings, reach = SHAPES[shape]
    model = shaken(tiny_model(position=NoPosition, **settings)).double().eval()
    assert model.receptive_field == reach
    text = torch.randint(11, (1, reach + 3), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(text)[:, -1]
        for back, matters in ((reach + 1, False), (reach, True)):
            changed = text.clone()
            changed[:, -back] = (changed[:, -back] + 1) % 11
            assert model(changed)[:, -1].equal(logits) != matters


def test_behind_sinks_the_beginning_always_matters():
    assert tiny_model(mask=Causal(5, sinks=1)).receptive_field is None


@pytest.mark.parametrize("mask", [Causal(), Causal(5), Causal(4, sinks=2)])
def test_a_row_of_a_batch_does_not_see_another_with_or_without_a_cache(mask):
    model = shaken(tiny_model(mask=mask, n_kv_head=2, smear=True, value_embeddings=True)).eval()
    text = torch.randint(11, (2, 24), generator=torch.Generator().manual_seed(0))
    other = text.clone()
    other[1] = (other[1] + 1) % 11
    with torch.no_grad():
        caches = model.new_cache(), model.new_cache()
        for part, changed in zip(text.split(6, dim=1), other.split(6, dim=1), strict=True):
            a, b = model(part, caches[0]), model(changed, caches[1])
            assert a[0].equal(b[0]) and not a[1].equal(b[1])
        assert model(text)[0].equal(model(other)[0])
