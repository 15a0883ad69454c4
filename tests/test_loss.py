"""The loss of a large vocabulary, made in chunks of tokens, is the plain one; recomputed blocks change no bit."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softattn_lm.attention.visibility import Causal
from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import IGNORED
from softattn_lm.training.loss import LARGE_VOCABULARY, Chunked, Whole, batch_loss, make_loss
from tests.models import shaken, tiny_model
from tests.tiny_run import losses, tiny_train

V = 11  # of the tiny model


def batch(seed: int = 0) -> list[Tensor]:
    return [torch.randint(V, (3, 17), generator=torch.Generator().manual_seed(seed))]


def gradients(model, given: list[Tensor], loss) -> tuple[Tensor, list[Tensor]]:
    value = batch_loss(model, given, loss)
    return value.detach(), list(torch.autograd.grad(value, list(model.parameters())))


@pytest.mark.parametrize("tokens", [1, 7, 16, 1000])  # one, some that do not divide 48, and more than there are
@pytest.mark.parametrize("more", [{}, {"final_cap": 0.7}, {"tie_head": True}], ids=str)
def test_a_loss_in_chunks_and_its_gradients_are_those_of_the_whole(tokens, more):
    model = shaken(tiny_model(**more)).double()
    (value, ours), (whole, theirs) = (gradients(model, batch(), loss) for loss in (Chunked(tokens), Whole()))
    torch.testing.assert_close(value, whole, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_places_that_are_not_asked_for_count_for_nothing_and_documents_stay_apart():
    model = shaken(tiny_model(mask=Causal(documents=True))).double()
    x = batch()[0][:, :-1]
    y = torch.where(torch.arange(16) % 3 == 0, x, IGNORED)
    packed = [batch()[0], torch.arange(16).ge(9).long().expand(3, 16)]
    for given in ([x, y, torch.tensor(2.5, dtype=torch.float64)], packed):
        (value, ours), (whole, theirs) = (gradients(model, given, loss) for loss in (Chunked(5), Whole()))
        torch.testing.assert_close(value, whole, rtol=0, atol=1e-12)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    asked = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum") / 2.5
    torch.testing.assert_close(batch_loss(model, [x, y, torch.tensor(2.5)], Chunked(5)), asked, rtol=0, atol=1e-6)


def test_in_bfloat16_chunks_err_no_more_than_the_whole():
    model = shaken(tiny_model(final_cap=5.0))
    _, exact = gradients(model, batch(), Whole())
    with torch.autocast("cpu", torch.bfloat16):
        (value, ours), (whole, theirs) = (gradients(model, batch(), loss) for loss in (Chunked(7), Whole()))
    assert abs(value - whole) < 1e-2
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - c).norm() < 1.3 * (b - c).norm() + 1e-3


def kept(compute) -> int:
    """Elements that a forward pass keeps for the backward one, weights and the like counted once."""
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        held[x.data_ptr()] = max(held.get(x.data_ptr(), 0), x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compute()
    return sum(held.values())


def test_chunks_keep_no_logits_for_the_way_back():
    h, head = torch.randn(1, 400, 8, requires_grad=True), nn.Linear(8, 500, bias=False)
    y = torch.randint(500, (1, 400))
    whole, chunked = (kept(partial(loss, h, head, None, y)) for loss in (Whole(), Chunked(10)))
    assert whole > 400 * 500 and chunked < 400 * 8 + 500 * 8 + 10


def test_small_vocabularies_keep_the_plain_loss_and_large_ones_take_chunks():
    assert make_loss(LARGE_VOCABULARY - 1) == Whole() and make_loss(LARGE_VOCABULARY) == Chunked()
    assert make_loss(10**6, 0) == Whole() and make_loss(5, 3) == Chunked(3)
    with pytest.raises(UserError, match=r"loss_chunk=-1 must be 0 or more"):
        make_loss(5, -1)


def test_without_gradients_no_gradient_is_made():
    model = shaken(tiny_model())
    with torch.no_grad():
        assert batch_loss(model, batch(), Chunked(5)).item() == pytest.approx(
            batch_loss(model, batch(), Whole()).item()
        )


def test_runs_with_a_loss_in_chunks_learn_what_others_learn(tmp_path):
    found = [losses(tiny_train(tmp_path, f"training.loss_chunk={chunk}")) for chunk in ("0", "5")]
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_blocks_computed_again_change_no_bit_with_dropout_on(tmp_path):
    names = ("none", "block")
    found = [losses(tiny_train(tmp_path, f"training.checkpoint_activations={name}")) for name in names]
    assert found[0] == found[1]


@pytest.mark.parametrize("more", [{}, {"value_residual": True, "smear": True}], ids=str)
def test_blocks_computed_again_keep_less_and_give_the_same_gradients(more):
    model = shaken(tiny_model(n_layer=4, dropout=0.3, **more)).train()
    found, memory = [], []
    for model.recomputes in (False, True):
        torch.manual_seed(0)
        found.append(gradients(model, batch(), Whole()))
        memory.append(kept(lambda: batch_loss(model, batch(), Whole())))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert memory[1] < 0.5 * memory[0]
