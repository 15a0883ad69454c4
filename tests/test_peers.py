"""The same numbers as the same formula in transformers and x-transformers: whole models, and single parts of them."""

from types import SimpleNamespace

import pytest
import torch

from softattn_lm.attention.kernels.formula import Formula
from softattn_lm.attention.kernels.hard import Hard
from softattn_lm.attention.kernels.topk import TopK
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.position.alibi import ALiBi, alibi_slopes
from softattn_lm.position.rotary import Rotary
from tests.models import tiny_model
from tests.peer_weights import from_llama, moved

pytest.importorskip("transformers", reason="transformers, of the dev extra, is not installed")


def modeling(name):
    """The module of a family, or a skip where this version of transformers has not got it."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hidden(visible):
    """A mask as they want it: added, −∞ where a key is hidden."""
    return torch.zeros(visible.dense().shape).masked_fill(~visible.dense(), -torch.inf)


@pytest.mark.parametrize("window", [None, 5])
def test_logits_equal_llama_and_with_a_window_mistral(window):
    import transformers

    shapes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "rms_norm_eps": torch.finfo(torch.float32).eps,
        "attn_implementation": "eager",
    }
    if window is None:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shapes)).eval()
    else:
        theirs = transformers.MistralForCausalLM(transformers.MistralConfig(**shapes, sliding_window=window)).eval()
    ours = tiny_model(vocab_size=50, n_kv_head=2, mlp="swiglu", mlp_width=72, mask=Causal(window)).eval()
    from_llama(ours, moved(theirs))
    idx = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(idx), theirs(idx).logits, atol=1e-4, rtol=1e-4)


def test_a_soft_cap_is_that_of_gemma_2():
    q, k, v = normal(2, 4, 7, 8), normal(2, 4, 7, 8, seed=1), normal(2, 4, 7, 8, seed=2)
    seen = Visibility(7, window=4)
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    y, a = modeling("gemma2").eager_attention_forward(module, q, k, v, hidden(seen), scaling=0.7, softcap=1.5)
    kernel, given = Formula(4, soft_cap=1.5), {"scale": 0.7, "visible": seen}
    torch.testing.assert_close(kernel.weights(q, k, **given), a, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(kernel(q, k, v, **given), y.transpose(1, 2), atol=1e-6, rtol=1e-5)


def test_a_learned_sink_is_that_of_gpt_oss():
    q, k, v = normal(2, 4, 7, 8), normal(2, 4, 7, 8, seed=1), normal(2, 4, 7, 8, seed=2)
    seen, kernel = Visibility(7, window=4), Formula(4, sink="learned")
    with torch.no_grad():
        kernel.sink.copy_(normal(4, seed=3))
    module = SimpleNamespace(num_key_value_groups=1, training=False, sinks=kernel.sink)
    y, a = modeling("gpt_oss").eager_attention_forward(module, q, k, v, hidden(seen), scaling=0.7)
    given = {"scale": 0.7, "visible": seen}
    torch.testing.assert_close(kernel.weights(q, k, **given), a, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(kernel(q, k, v, **given), y.transpose(1, 2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("n_head", [1, 2, 6, 8, 12, 20])
def test_slopes_and_weights_under_alibi_are_those_of_bloom(n_head):
    theirs = modeling("bloom").build_alibi_tensor(torch.ones(1, 9), n_head, torch.float32)  # (H, 1, S)
    torch.testing.assert_close(theirs[:, 0, 1], torch.tensor(alibi_slopes(n_head)))
    # They add slope · j, which differs from −slope · (i − j) by a constant per row only.
    seen = Visibility(9)
    q, k = normal(1, n_head, 9, 4), normal(1, n_head, 9, 4, seed=1)
    expected = torch.softmax(0.5 * q @ k.mT + theirs + hidden(seen), dim=-1)
    ours = Formula(n_head).weights(q, k, scale=0.5, visible=seen, bias=ALiBi(n_head).bias(seen))
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_rotation_is_that_of_llama_and_in_part_that_of_gpt_neox(fraction):
    module, x = modeling("gpt_neox"), normal(2, 3, 9, 16)
    rotated = int(16 * fraction)
    angle = torch.arange(9)[:, None] / 10000 ** (torch.arange(0, rotated, 2) / rotated)
    wide = torch.cat((angle, angle), dim=-1)[None]  # (1, T, R)
    theirs, _ = module.apply_rotary_pos_emb(x, x, wide.cos(), wide.sin())
    ours = Rotary(head_dim=16, context=16, fraction=fraction).rotation(range(9))(x)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    if fraction == 1.0:
        torch.testing.assert_close(ours, modeling("llama").apply_rotary_pos_emb(x, x, wide.cos(), wide.sin())[0])


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_edge_of_a_window_is_theirs(window):
    masking = pytest.importorskip("transformers.masking_utils")
    near = masking.sliding_window_overlay(window)
    expected = [[j <= i and bool(near(0, 0, i, j)) for j in range(7)] for i in range(7)]
    assert Visibility(7, window=window).dense().tolist() == expected


VARIANTS = {
    "hard": (Hard(), {"hard": True}),
    "topk": (TopK(top=3), {"sparse_topk": 3}),
    "softmax-plus-one": (Formula(4, sink="one"), {"add_zero_kv": True}),
    "learned sink": (Formula(4, sink="learned"), {"head_learned_sink": True}),
    "soft cap": (Formula(4, soft_cap=2.0), {"softclamp_logits": True, "logit_softclamp_value": 2.0}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_those_of_x_transformers(variant):
    attend = pytest.importorskip("x_transformers.attend", reason="x-transformers, of the dev extra, is not installed")
    kernel, options = VARIANTS[variant]
    theirs = attend.Attend(causal=True, scale=0.5, heads=4, **options)
    if variant == "learned sink":
        with torch.no_grad():
            kernel.sink.copy_(normal(4, seed=3))
            theirs.head_attn_sink.copy_(kernel.sink)
    results = []
    for function in (lambda *qkv: kernel(*qkv, scale=0.5, visible=Visibility(9)), lambda *qkv: theirs(*qkv)[0]):
        leaves = [normal(2, 4, 9, 8, seed=seed).requires_grad_() for seed in range(3)]
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
