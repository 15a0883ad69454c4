"""Multi-head latent attention: by hand, in its absorbed form, as ordinary attention, and what its cache holds."""

import warnings
from functools import partial

import pytest
import torch

from softattn_lm.attention.block import Given
from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.latent import Latent
from softattn_lm.attention.projections import Separate, SharedKV
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError
from softattn_lm.model.block import make
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from tests.models import shaken, tiny_model
from tests.recurrent_kernel import Summing

SHAPES = {"d_model": 32, "n_head": 4, "n_kv_head": 4, "head_dim": 8, "bias": False}


def text(rows: int, length: int) -> torch.Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def randomised(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


def test_latent_by_hand():
    # 1 head of 4 components over 2, rank 1, 2 components turn.
    latent = Latent(d_model=2, n_head=1, n_kv_head=1, head_dim=4, bias=False, rank=1, rope_dim=2)
    with torch.no_grad():
        latent.down.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 2.0]]))
        latent.norm.weight.fill_(6.0)  # of one component x, norm(x) is its sign
        latent.up.weight.copy_(torch.tensor([[10.0], [20.0], [1.0], [2.0], [3.0], [4.0]]))
        latent.q.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]]))
    q, k, v = (y.flatten().tolist() for y in latent(torch.tensor([[[5.0, 7.0]]])))
    assert q == [5.0, 7.0, 12.0, -2.0]
    # c = 6; the part that turns comes first: [5, 14], then 6 · [10, 20]
    assert k == pytest.approx([5.0, 14.0, 60.0, 120.0]) and v == pytest.approx([6.0, 12.0, 18.0, 24.0])


def test_queries_have_a_latent_of_their_own_if_asked():
    latent = Latent(d_model=2, n_head=1, n_kv_head=1, head_dim=4, bias=False, rank=1, rope_dim=2, q_rank=2)
    with torch.no_grad():
        latent.q_down.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        latent.q.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]))
    q = latent(torch.tensor([[[1.0, 1.0]]]))[0].flatten()
    root = 12.5**0.5  # root mean square of [3, 4]
    torch.testing.assert_close(q, torch.tensor([3.0, 4.0, 7.0, 6.0]) / root)


@pytest.mark.parametrize("n_kv_head", [4, 2])
@pytest.mark.parametrize("rope_dim", [0, 4])
def test_the_absorbed_form_equals_the_naive_one(rope_dim, n_kv_head):
    """W_k goes into the query and W_v behind the average: attention over the latents, one per token."""
    position = Rotary if rope_dim else NoPosition
    settings = {"n_layer": 1, "position": position, "n_kv_head": n_kv_head}
    model = tiny_model(projections=partial(Latent, rank=6, rope_dim=rope_dim), **settings)
    attention, x = randomised(model.blocks[0].attention), numbers(2, 9, 32)
    rotation = model.positions[0].rotation(range(9))
    with torch.no_grad():
        naive = attention(x, Given(Visibility(9), rotation)).y
        projections = attention.projections
        q, written = projections.write(x)
        c, r = written[:, 0, :, :6], written[:, 0, :, 6:]  # (B, S, rank), (B, S, R)
        if rotation is not None:
            q, r = rotation(q), rotation(r[:, None])[:, 0]
        w_k, w_v = projections.up.weight.split(list(projections.up.parts.values()))
        of_group = [h // (4 // n_kv_head) for h in range(4)]
        w_k = w_k.view(n_kv_head, 8 - rope_dim, 6)[of_group]  # (H, D − R, rank)
        w_v = w_v.view(n_kv_head, 8, 6)[of_group]  # (H, D, rank)
        asked = torch.einsum("bhtd,hdr->bhtr", q[..., rope_dim:], w_k)
        scores = torch.einsum("bhtr,bsr->bhts", asked, c) + torch.einsum("bhtr,bsr->bhts", q[..., :rope_dim], r)
        a = (scores / 8**0.5).masked_fill(~Visibility(9).dense(), -torch.inf).softmax(-1)
        y = torch.einsum("bhts,bsr,hdr->bhtd", a, c, w_v)
        absorbed = attention.out(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(absorbed, naive, atol=1e-10, rtol=1e-10)


def test_with_the_identity_as_its_latent_it_is_multi_head_attention():
    latent, separate = make(partial(Latent, rank=32, rope_dim=0), **SHAPES), make(Separate, **SHAPES)
    randomised(separate), randomised(latent)
    with torch.no_grad():
        latent.down.weight.copy_(torch.eye(32))
        latent.norm.weight.fill_(1.0)
        q, k, v = separate.qkv.weight.split([32, 32, 32])
        latent.q.weight.copy_(q)
        latent.up.weight.copy_(torch.cat((k, v)))
        x = torch.nn.functional.rms_norm(numbers(2, 5, 32), (32,), eps=0.0)  # the norm of the latent leaves it alone
        for mine, theirs in zip(latent(x), separate(x), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_a_rotation_turns_the_shared_part_and_nothing_else():
    model = tiny_model(projections=partial(Latent, rank=6, rope_dim=4), n_layer=1)
    rotation = model.positions[0].rotation(range(5))
    x = numbers(1, 4, 5, 8)
    turned = rotation(x)
    assert torch.equal(turned[..., 4:], x[..., 4:]) and rotation.cos.shape == (5, 2)
    # pair 0 of token 2 turns by 2 radians, pair 1 by 2/100: the frequencies are those of 4 components, and not of 8
    angles = torch.tensor([2.0, 0.02])
    torch.testing.assert_close(rotation.cos[2], angles.cos())


@pytest.mark.parametrize("n_kv_head", [4, 2])
@pytest.mark.parametrize(
    ("position", "settings"),
    [
        (position, settings)
        for position in (Rotary, ALiBi, NoPosition, Learned)
        for settings in ({}, {"rank": 4, "rope_dim": 2, "q_rank": 6}, {"rank": 3, "rope_dim": 0})
        if position is not Rotary or settings.get("rope_dim") != 0  # which leaves it nothing to turn
    ],
)
def test_decoding_from_latents_equals_the_full_pass(position, settings, n_kv_head):
    idx = text(2, 16 if position is Learned else 40)
    chunks = [9, 1, 1, 5] if position is Learned else [9, 1, 1, 13, 16]
    for mask in (Causal(), Causal(5), Causal(4, sinks=2)):
        for other in ({"value_embeddings": True}, {"qk_norm": "rms_gain", "output_gate": "head", "smear": True}):
            given = {"position": position, "mask": mask, "n_kv_head": n_kv_head, **other}
            model = shaken(tiny_model(projections=partial(Latent, **settings), **given)).eval()
            cache = model.new_cache()
            with torch.no_grad():
                cached = torch.cat([model(part, cache) for part in idx.split(chunks, dim=1)], dim=1)
                torch.testing.assert_close(cached, model(idx), atol=3e-5, rtol=3e-5, msg=str(vars(mask)))


def test_packed_documents_decode_from_latents_as_they_do_alone():
    model = shaken(tiny_model(projections=Latent, mask=Causal(4, documents=True), value_embeddings=True)).eval()
    lengths, chunks = [9, 2, 19], [7, 1, 1, 4, 16, 1]
    idx, documents = text(1, 30), torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    cache = model.new_cache()
    with torch.no_grad():
        alone = torch.cat([model(part) for part in idx.split(lengths, dim=1)], dim=1)
        parts = zip(idx.split(chunks, dim=1), documents.split(chunks, dim=1), strict=True)
        cached = torch.cat([model(part, cache, documents=numbers) for part, numbers in parts], dim=1)
    torch.testing.assert_close(cached, alone, atol=2e-5, rtol=2e-5)


def test_the_cache_holds_the_latent_and_the_part_that_turns_and_no_more():
    model = tiny_model(projections=partial(Latent, rank=6, rope_dim=4))
    assert model.cache_bytes_per_token() == 2 * (6 + 4) * 4
    cache = model.new_cache()
    model(text(1, 3), cache)
    assert {name: rows.shape[1::2] for name, rows in cache.streams(0).items()} == {"written": (1, 10)}


def test_value_embeddings_are_looked_up_again_from_tokens_that_are_cached():
    # Every second layer has a table, whose tokens are 8 bytes each, and for K = V as well.
    model = tiny_model(projections=partial(Latent, rank=6, rope_dim=4), value_embeddings=True)
    assert model.cache_bytes_per_token() == 2 * (6 + 4) * 4 + 8
    assert tiny_model(projections=SharedKV, value_embeddings=True).cache_bytes_per_token() == 2 * 32 * 4 + 8


def test_what_is_cached_is_not_turned_yet():
    """Keys are made of it again for every query, and a rotation in it would be applied twice."""
    model = shaken(tiny_model(projections=partial(Latent, rank=6, rope_dim=4), n_layer=1)).eval()
    cache: KVCache = model.new_cache()
    with torch.no_grad():
        model(text(1, 3), cache)
        x = model.blocks[0].attention_norm(model.embed(text(1, 3)))
        _, written = model.blocks[0].attention.projections.write(x)
    torch.testing.assert_close(cache.streams(0)["written"][:, :, :3], written)


def test_latents_write_to_a_state_as_other_projections_do():
    model, idx = shaken(tiny_model(Summing, projections=Latent)).eval(), text(2, 30)
    cache = model.new_cache()
    with torch.no_grad():
        cached = torch.cat([model(part, cache) for part in idx.split([9, 1, 20], dim=1)], dim=1)
        torch.testing.assert_close(cached, model(idx), atol=3e-5, rtol=3e-5)
    assert model.cache_bytes_per_token() == 0


def test_parameters_and_their_parts_are_counted():
    # down (6 + 4) · 32, norm 6, up (4 · 4 + 32) · 6, q 32 · 32
    made = make(partial(Latent, rank=6, rope_dim=4), **SHAPES)
    assert sum(p.numel() for p in made.parameters()) == 10 * 32 + 6 + (16 + 32) * 6 + 32 * 32
    roles = {r.name: r for r in tiny_model(projections=partial(Latent, rank=6, rope_dim=4, q_rank=5)).parameter_roles()}
    of = "blocks.1.attention.projections."
    assert roles[of + "down.weight"].rows == (6, 4) and roles[of + "up.weight"].rows == (16, 32)
    assert roles[of + "q.weight"].rows == (32,) and roles[of + "q_down.weight"].rows == (5,)
    assert {roles[of + name].role for name in ("down.weight", "up.weight", "q.weight", "q_down.weight")} == {"hidden"}
    assert {roles[of + name].role for name in ("norm.weight", "q_norm.weight")} == {"vector"}


def test_what_it_saves_goes_to_the_mlp():
    def count(policy):
        return sum(p.numel() for p in tiny_model(projections=policy).parameters())

    unit = 2 * 32  # of an MLP of two matrices
    given = count(partial(Latent, rank=6, give_to_mlp=True))
    assert abs(given - count(Separate)) <= 2 * unit / 2 and count(partial(Latent, rank=6)) < given - 2 * unit


def test_starting_values_of_queries_are_chosen_by_init_q():
    wide, narrow = (
        tiny_model(projections=Latent, init_q=init).blocks[0].attention.projections for init in (None, "gpt2")
    )
    assert wide.q.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert narrow.q.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(wide.up.weight, narrow.up.weight)


@pytest.mark.parametrize("q_rank", [None, 8])
def test_its_norms_keep_to_the_precision_of_their_gains_under_autocast(q_rank):
    """torch warned of a "Mismatch dtype" and left the fused norm: bfloat16 numbers, a float32 gain."""
    model = tiny_model(projections=partial(Latent, q_rank=q_rank), n_head=4)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        logits = model(text(2, 8))
    logits.float().sum().backward()
    assert model.layers[0].attention.projections.norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(logits.float(), model(text(2, 8)), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"rank": 0}, {}, r"projections\.rank=0"),
        ({"q_rank": 0}, {}, r"projections\.q_rank=0"),
        ({"rope_dim": 3}, {}, r"projections\.rope_dim=3 of a head of 8 components must be even and leave some"),
        ({"rope_dim": 8}, {}, r"type projections\.rope_dim=4"),
        ({"rope_dim": 0}, {"position": Rotary}, r"projections\.rope_dim=0 leaves position=rotary nothing to turn"),
        (
            {},
            {"value_residual": True},
            r"Latent cannot honour model\.value_residual=true: its cache.*type model\.value_r",
        ),
        ({}, {"short_conv": 4}, r"model\.short_conv=4: its cache holds no keys.*type model\.short_conv=0"),
    ],
)
def test_what_a_latent_cannot_hold_is_refused(options, settings, said):
    with pytest.raises(UserError, match=said):
        tiny_model(projections=partial(Latent, **options), **{"position": NoPosition, **settings})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["model.value_residual=true"], r"model\.value_residual=true changes them; type model\.value_residual=f"),
        (["model.short_conv=4"], r"type model\.short_conv=0, or projections=separate"),
        (["projections.rope_dim=3"], r"projections\.rope_dim must be an even number from 0 on"),
        (["projections.rope_dim=0"], "leaves position=rotary nothing to turn"),
        (["projections.q_rank=0"], r"projections\.q_rank must be at least 1"),
    ],
)
def test_the_same_is_refused_before_torch_is_imported(typed, said):
    with pytest.raises(UserError, match=said):
        check(compose("train", ["model=plain", "projections=latent", *typed], config_folder()), "TrainSettings")


def test_an_odd_head_is_no_obstacle_to_a_part_that_turns():
    cfg = compose("train", ["model=plain", "projections=latent", "model.head_dim=33"], config_folder())
    check(cfg, "TrainSettings")
    model = tiny_model(projections=Latent, head_dim=9)
    assert model.blocks[0].attention.projections.turned == 4 and model(text(1, 5)).isfinite().all()
