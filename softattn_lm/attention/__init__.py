"""Room 1, the paper: attention as a soft dictionary lookup, y = softmax(scale · q kᵀ + M) v, one policy per
question.
"""

from softattn_lm.attention.block import CausalSelfAttention
from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.visibility import Causal, Visibility

__all__ = ["AttentionKernel", "Causal", "CausalSelfAttention", "KVCache", "Visibility"]
