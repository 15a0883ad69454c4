"""What `benchmark` compares with: models of other libraries in a Shape, without dropout. Imports torch only; a library
is imported by the function that builds its model.

    transformers      GPT-2, the function of its weights that gpt2_style is; Llama, that llama_style is
    litgpt            Llama, that llama_style is
    x-transformers    GPT-2 without biases in attention and norms

transformers has to be there; the others are left out where they cannot be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from softattn_lm.commands.bare_training import BareLoop, Shape, fused_adamw
from softattn_lm.commands.comparison import Report, no_compiler
from softattn_lm.errors import UserError
from softattn_lm.model.layers import default_width

BENCH = "in the checkout, type: pip install -c .ci/constraints.txt -e '.[bench]'"
# Name -> its module, and what to type. litgpt asks for an older huggingface-hub than transformers does, for commands
# that are not used here.
OPTIONAL = {
    "litgpt": (
        "litgpt",
        "in the checkout, type: pip install -c .ci/constraints.txt --no-deps litgpt psutil jsonargparse",
    ),
    "x-transformers": ("x_transformers", BENCH),
}


def opened(topic: str, report: Report) -> Report:
    """`report`, which has said what is left out. Raises UserError without transformers, whose advice is silenced."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"benchmark {topic} compares with transformers; {BENCH}") from error
    transformers.logging.set_verbosity_error()
    report.open()
    report.found["left_out"] = {}
    for name, line in left_out().items():
        leave_out(report, name, line)
    return report


def leave_out(report: Report, name: str, line: str) -> None:
    """Says so, and the file too."""
    report.found["left_out"][name] = line
    report.console.print(line, highlight=False, markup=False, soft_wrap=True)


def leave_uncompiled(report: Report, name: str, error: RuntimeError) -> None:
    """What could not be compiled. Raises every other error again."""
    from torch._dynamo.exc import BackendCompilerFailed

    wanted = "; it needs a C++ compiler, such as g++" if no_compiler(error) else ""
    if not wanted and not isinstance(error, BackendCompilerFailed):
        raise error
    said = str(error).strip().partition("\n")[0]
    leave_out(report, name, f"{name} is left out ({said}){wanted}")


def left_out() -> dict[str, str]:
    """Name of a library that cannot be imported -> a line that says why, and what to type."""
    lines = {}
    for name, (module, typed) in OPTIONAL.items():
        try:
            import_module(module)
        except ImportError as error:
            lines[name] = f"{name} is left out ({error}); {typed}"
    return lines


def transformers_gpt2(shape: Shape) -> nn.Module:
    """Its defaults (SDPA), and without the cache that training has no use for."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def transformers_llama(shape: Shape) -> nn.Module:
    """As above: RMSNorm, rotary positions, SwiGLU as wide as ours, no biases, a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        hidden_size=shape.width,
        intermediate_size=default_width("swiglu", shape.width),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        rms_norm_eps=torch.finfo(torch.float32).eps,  # torch's own, which ours takes
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def litgpt_llama(shape: Shape) -> Any:
    """Its vocabulary is not padded, and its head is tied as its own pretraining ties it."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=shape.context,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        vocab_size=shape.vocabulary,
        padded_vocab_size=shape.vocabulary,
        parallel_residual=False,
        rotary_percentage=1.0,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=torch.finfo(torch.float32).eps,
        mlp_class_name="LLaMAMLP",
        intermediate_size=default_width("swiglu", shape.width),
    )
    model = GPT(config)
    model.apply(model._init_weights)
    model.transformer.wte.weight = model.lm_head.weight
    return model


def x_transformers_gpt2(shape: Shape) -> Any:
    """Fused attention, and nothing of what it adds to GPT-2 by default."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.width,
        depth=shape.layers,
        heads=shape.heads,
        attn_dim_head=shape.width // shape.heads,
        attn_flash=True,
        ff_custom_activation=nn.GELU(approximate="tanh"),
        norm_add_unit_offset=False,
        verbose=False,
    )
    return TransformerWrapper(
        num_tokens=shape.vocabulary,
        max_seq_len=shape.context,
        attn_layers=layers,
        tie_embedding=True,
        tie_embedding_scale=1.0,
    )


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    """A model of transformers as a function of tokens."""

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens).logits
        return found

    return logits


def of_transformers(
    shape: Shape, bfloat16: bool = False, build: Callable[[Shape], nn.Module] = transformers_gpt2
) -> BareLoop:
    model = build(shape)
    return BareLoop(model, logits_of(model), fused_adamw(model), shape, bfloat16=bfloat16)


def of_others(shape: Shape, llama: bool = False) -> dict[str, BareLoop]:
    """The optional ones of that style that are there."""
    builders = {"litgpt": litgpt_llama} if llama else {"x-transformers": x_transformers_gpt2}
    models = {name: build(shape) for name, build in builders.items() if name not in left_out()}
    return {name: BareLoop(model, model, fused_adamw(model), shape) for name, model in models.items()}
