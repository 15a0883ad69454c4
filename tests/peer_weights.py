"""Ours with the weights of another library's model, which is then to give the same logits."""

from typing import Any

import torch
from torch import Tensor

from softattn_lm.model.decoder import DecoderLM


def moved(model: Any) -> Any:
    """Every parameter off its start, so that gains of 1 and biases of 0 take part."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return model.eval()


@torch.no_grad()
def from_llama(ours: DecoderLM, theirs: Any) -> None:
    ours.embed.weight.copy_(theirs.model.embed_tokens.weight)
    ours.head.weight.copy_(theirs.lm_head.weight)
    ours.final_norm.weight.copy_(theirs.model.norm.weight)
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        attention = layer.self_attn
        three = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        block.attention.projections.qkv.weight.copy_(torch.cat(three))
        block.attention.out.weight.copy_(attention.o_proj.weight)
        block.attention_norm.weight.copy_(layer.input_layernorm.weight)
        block.mlp_norm.weight.copy_(layer.post_attention_layernorm.weight)
        for name in ("up", "gate", "down"):
            getattr(block.mlp, name).weight.copy_(getattr(layer.mlp, f"{name}_proj").weight)


@torch.no_grad()
def from_litgpt(ours: DecoderLM, theirs: Any) -> None:
    ours.embed.weight.copy_(theirs.transformer.wte.weight)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    pairs = [(ours.final_norm, theirs.transformer.ln_f)]
    for block, layer in zip(ours.blocks, theirs.transformer.h, strict=True):
        pairs += [
            (block.attention_norm, layer.norm_1),
            (block.attention.projections.qkv, layer.attn.qkv),
            (block.attention.out, layer.attn.proj),
            (block.mlp_norm, layer.norm_2),
            (block.mlp.gate, layer.mlp.fc_1),
            (block.mlp.up, layer.mlp.fc_2),
            (block.mlp.down, layer.mlp.proj),
        ]
    for mine, other in pairs:
        mine.weight.copy_(other.weight)


@torch.no_grad()
def from_x_transformers(ours: DecoderLM, theirs: Any) -> None:
    ours.embed.weight.copy_(theirs.token_emb.emb.weight)
    ours.positions[0].table.copy_(theirs.pos_emb.emb.weight * theirs.pos_emb.scale)
    layers = theirs.attn_layers
    fill(ours.final_norm, layers.final_norm.gamma)
    for block, attends, feeds in zip(ours.blocks, layers.layers[::2], layers.layers[1::2], strict=True):
        (norm, *_), attention, _ = attends
        fill(block.attention_norm, norm.gamma)
        fill(
            block.attention.projections.qkv,
            torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]),
        )
        fill(block.attention.out, attention.to_out.weight)
        (norm, *_), feed_forward, _ = feeds
        up, down = feed_forward.ff[0][0], feed_forward.ff[2]
        fill(block.mlp_norm, norm.gamma)
        fill(block.mlp.up, up.weight, up.bias)
        fill(block.mlp.down, down.weight, down.bias)


def fill(mine: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    """A bias that they have not is 0."""
    mine.weight.copy_(weight)
    mine.bias.copy_(torch.zeros_like(mine.bias) if bias is None else bias)
