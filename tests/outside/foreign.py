"""Callables of other stacks, by their signatures."""

import torch
import torch.nn.functional as F


def bottom_right(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """torch's, with the triangle where a decoding caller needs it."""
    if is_causal:
        new, total = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, scale=scale)


def top_left(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def finite_constant(query, key, value, attn_mask=None, is_causal=False, scale=None):
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    if attn_mask is not None:
        added = torch.where(attn_mask, 0.0, -1e4) if attn_mask.dtype == torch.bool else attn_mask
        scores = scores + added.to(scores.dtype)
    return torch.softmax(scores, -1) @ value


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score - torch.exp2(-2.0 * (h + 1)) * (q_idx - kv_idx)


def hf_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """As in transformers' documentation: masked by what arrives, which is None for a name registered by itself."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(torch.softmax(scores, -1), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
