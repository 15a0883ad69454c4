"""The same attention function, registered together with the mask it needs."""

from foreign import hf_attention as hf_attention_without_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask


def hf_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return hf_attention_without_mask(module, query, key, value, attention_mask, scaling, dropout, **kwargs)


AttentionInterface.register("registered_with_mask", hf_attention)
AttentionMaskInterface.register("registered_with_mask", eager_mask)
