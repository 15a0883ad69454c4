"""The decoder: its parameters, its start, and the same logits as the same model elsewhere."""

import math

import pytest
import torch
import torch.nn.functional as F

from softattn_lm.attention.projections import LowRank
from softattn_lm.errors import UserError
from softattn_lm.model.parameters import stream
from softattn_lm.position.learned import Learned
from tests.models import shaken, tiny_model

NANOGPT = {
    "vocab_size": 65,
    "context": 64,
    "n_layer": 4,
    "d_model": 128,
    "position": Learned,
    "norm": "layer",
    "tie_head": True,
    "init": "gpt2",
}
FAST = {
    "qk_norm": "rms",
    "norm_gain": False,
    "embed_norm": True,
    "mlp": "relu2",
    "zero_out": True,
    "smear": True,
    "value_embeddings": True,
}


def test_the_published_nanogpt_cpu_shape_has_804096_parameters():
    assert sum(p.numel() for p in tiny_model(**NANOGPT).parameters()) == 804_096


def test_the_fast_recipe_of_the_same_shape_is_within_five_percent():
    count = sum(p.numel() for p in tiny_model(vocab_size=65, context=64, n_layer=4, d_model=128, **FAST).parameters())
    assert abs(count / 804_096 - 1) < 0.05


@pytest.mark.parametrize("recipe", [NANOGPT, {**FAST, "vocab_size": 65}])
def test_loss_at_step_zero_is_ln_v(recipe):
    model, idx = tiny_model(**recipe), torch.randint(65, (32, 16))
    loss = F.cross_entropy(model(idx).flatten(0, 1), torch.randint(65, (32 * 16,)))
    assert loss.item() == pytest.approx(math.log(65), abs=0.06 if recipe is NANOGPT else 1e-5)


def test_logits_equal_gpt2_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers, of the dev extra, is not installed")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(theirs.transformer.h[0].attn.c_attn.bias)
    ours = tiny_model(
        vocab_size=50, position=Learned, norm="layer", mlp="gelu_tanh", bias=True, tie_head=True, init="gpt2"
    ).eval()
    with torch.no_grad():
        ours.embed.weight.copy_(theirs.transformer.wte.weight)
        ours.positions[0].table.copy_(theirs.transformer.wpe.weight)
        pairs = [(ours.final_norm, theirs.transformer.ln_f)]
        for block, layer in zip(ours.blocks, theirs.transformer.h, strict=True):
            pairs += [
                (block.attention_norm, layer.ln_1),
                (block.mlp_norm, layer.ln_2),
                (block.attention.projections.qkv, layer.attn.c_attn),
            ]
            pairs += [
                (block.attention.out, layer.attn.c_proj),
                (block.mlp.up, layer.mlp.c_fc),
                (block.mlp.down, layer.mlp.c_proj),
            ]
        for mine, other in pairs:
            # Their linear layers store (in, out).
            mine.weight.copy_(other.weight.T if other.weight.ndim == 2 else other.weight)
            mine.bias.copy_(other.bias)
    idx = torch.randint(50, (3, 16))
    torch.testing.assert_close(ours(idx), theirs(idx).logits, atol=1e-5, rtol=1e-5)


def test_every_parameter_has_one_role_and_only_matrices_are_hidden():
    model = tiny_model(position=Learned, bias=True, norm="layer", smear=True, value_embeddings=True, mlp="swiglu")
    roles = model.parameter_roles()
    assert [r.name for r in roles] == [name for name, _ in model.named_parameters()]
    by_role = {role: {r.name for r in roles if r.role == role} for role in ("embedding", "head", "hidden", "vector")}
    assert by_role["embedding"] == {"embed.weight", "positions.0.table", "blocks.1.value.table.weight"}
    assert by_role["head"] == {"head.weight"}
    hidden = {"attention.projections.qkv", "attention.out", "mlp.up", "mlp.gate", "mlp.down"}
    assert by_role["hidden"] == {f"blocks.{i}.{part}.weight" for i in range(2) for part in hidden}
    assert all(r.parameter.ndim == 1 for r in roles if r.role == "vector")


def test_fused_rows_name_queries_keys_and_values():
    roles = {r.name: r for r in tiny_model(n_kv_head=2).parameter_roles()}
    assert roles["blocks.0.attention.projections.qkv.weight"].rows == (32, 16, 16)
    assert roles["blocks.0.mlp.up.weight"].rows == (128,)


def test_a_tied_head_is_one_parameter_and_an_embedding():
    roles = tiny_model(tie_head=True).parameter_roles()
    assert [r.name for r in roles if r.parameter.shape[0] == 11] == ["embed.weight"]


@pytest.mark.parametrize(
    ("small", "large"), [((3, 5), (7, 9)), ((3, 5), (3, 17)), ((4,), (9,)), ((2, 3, 4), (5, 3, 4))]
)
def test_a_larger_tensor_contains_the_smaller_as_its_leading_block(small, large):
    first, second = stream(0, "w", small), stream(0, "w", large)
    assert second[tuple(slice(n) for n in small)].equal(first)


def test_streams_differ_by_seed_name_and_row_and_are_normal():
    values = stream(0, "w", (200, 300))
    for other in (stream(1, "w", (200, 300)), stream(0, "v", (200, 300))):
        assert abs((values * other).mean()) < 0.02
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02
    assert abs((values[:-1] * values[1:]).mean()) < 0.02


def test_arms_that_differ_share_the_values_of_their_common_parameters():
    plain = dict(tiny_model().named_parameters())
    for other in (
        tiny_model(smear=True, value_embeddings=True),
        tiny_model(n_layer=3),
        tiny_model(vocab_size=20),
        tiny_model(n_kv_head=4, mlp_width=200),
    ):
        theirs = dict(other.named_parameters())
        for name in ("embed.weight", "blocks.0.mlp.up.weight", "blocks.1.attention.projections.qkv.weight"):
            block = tuple(slice(n) for n in plain[name].shape)
            assert theirs[name][block].equal(plain[name])


@pytest.mark.parametrize("more", [{}, {"mlp": "swiglu", "output_gate": "head"}, {"projections": LowRank}])
def test_the_seed_decides_every_initial_value_biases_too(more):
    """Biases came from torch's own generator: the first run of a process started elsewhere than the same run again."""
    torch.manual_seed(1)
    first = tiny_model(bias=True, **more)
    torch.manual_seed(2)
    again = tiny_model(bias=True, **more)
    names = [name for name, p in first.named_parameters() if not torch.equal(p, again.get_parameter(name))]
    assert names == []


def test_fewer_groups_start_with_the_same_queries_keys_and_values():
    full, grouped = (tiny_model(n_kv_head=g).blocks[0].attention.projections.qkv.weight for g in (4, 2))
    assert grouped[:32].equal(full[:32]) and grouped[32:48].equal(full[32:48]) and grouped[48:].equal(full[64:80])


def test_wq_and_wk_choose_their_initial_size_apart():
    model = tiny_model(d_model=128, head_dim=64, init="fan_in", init_q="gpt2")
    q, k, v = model.blocks[0].attention.projections.qkv.weight.split(256)
    assert [part.std().item() for part in (q, k, v)] == pytest.approx([0.02, 128**-0.5, 128**-0.5], rel=0.03)


def test_gpt2_start_scales_what_writes_to_the_residual_stream():
    block = tiny_model(d_model=128, init="gpt2").blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for writer in (block.mlp.down, block.attention.out):
        assert writer.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)


def test_fan_in_start_keeps_activations_at_unit_variance():
    model = tiny_model(d_model=256, vocab_size=300)
    x = model.embed(torch.arange(300))
    attention = model.blocks[0].attention
    q, k, v = attention.projections(x[None])
    for activations in (x, q, k, v, model.blocks[0].mlp.up(x)):
        assert activations.std().item() == pytest.approx(1, rel=0.1)


def test_the_final_cap_bounds_logits_and_leaves_small_ones():
    model = shaken(tiny_model()).eval()
    free = model(torch.arange(11)[None])
    model.final_cap = 0.5
    torch.testing.assert_close(model(torch.arange(11)[None]), 0.5 * torch.tanh(free / 0.5))


def test_attention_only_layers_have_no_mlp():
    names = [name for name, _ in tiny_model(mlp="none").named_parameters()]
    assert not [name for name in names if "mlp" in name]


def test_head_width_is_free_of_the_model_width():
    model = shaken(tiny_model(d_model=30, n_head=4, head_dim=6))
    assert model(torch.arange(11)[None]).shape == (1, 11, 11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_head": 5}, "d_model=32 does not divide into model.n_head=5"),
        ({"n_kv_head": 3}, "n_head=4 does not divide into model.n_kv_head=3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        tiny_model(**settings)


def test_residual_and_embedding_dropout_are_alive_in_training_only():
    model = shaken(tiny_model(dropout=0.5))
    idx = torch.arange(11)[None]
    assert not model.train()(idx).equal(model(idx))
    assert model.eval()(idx).equal(model(idx))


def test_a_kernel_that_chooses_its_implementation_says_which_and_why():
    from softattn_lm.attention.kernels.auto import Auto
    from softattn_lm.attention.visibility import Causal

    assert tiny_model().explain_kernels("cpu") == []
    assert tiny_model(Auto).explain_kernels("cpu") == ["sdpa: torch's fused kernel honours all of it on cpu"]
    (line,) = tiny_model(Auto, context=2048, mask=Causal(64)).explain_kernels("cpu")
    assert line.startswith("blockwise: a window of 64")
