"""The same A as `formula` in memory that grows with T and not with T², forward and backward, on every device.

Scores exist one tile at a time, with their own backward pass that makes them again; tiles that no query may read are
skipped. It gives CPUs what FlexAttention gives CUDA: windows, packed documents, soft caps, sinks and biases that train
on long sequences. The arithmetic is in softattn_lm/attention/online_softmax.py, the choice of tiles in tiles.py.

Dao et al. 2022, arXiv:2205.14135; Rabe & Staats 2021, arXiv:2112.05682.
"""

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.bias_gradient import learned
from softattn_lm.attention.kernels.formula import Sink, SoftmaxKernel
from softattn_lm.attention.online_softmax import Settings, TiledAttention
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError

# Elements of a tile over all heads. On a CPU it should stay in the cache; a GPU wants few, large steps.
CPU_TILE, GPU_TILE = 2**20, 2**26


@torch.compiler.disable
def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor,
    visible: Visibility,
    bias: Bias | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    query_block: int | None = None,
    key_block: int | None = None,
) -> Tensor:
    """(B, H, T, D), (B, G, S, D), (B, G, S, D) -> (B, H, T, D); sink: (H,) scores. Noise is drawn if dropout > 0."""
    dtype = q.dtype
    if isinstance(scale, Tensor) or scale == 0:
        q, scale = q * scale, 1.0  # autograd takes the gradient of the scale from that of q
    # Noise is drawn again in the backward pass, so it has a seed, taken from torch's own stream.
    seed = int(torch.randint(2**62, ()).item()) if dropout else 0
    tensors = learned(bias)
    blocks = block_sizes(q, visible, query_block, key_block)
    settings = Settings(scale, visible, soft_cap, bias, tuple(tensors), dropout, seed, *blocks)
    y: Tensor = TiledAttention.apply(settings, q, k, v, sink, *tensors.values())
    return y.to(dtype)


def block_sizes(q: Tensor, visible: Visibility, query_block: int | None, key_block: int | None) -> tuple[int, int, int]:
    """(queries, keys, rows of the batch) of a tile, where they are not given."""
    b, h, t = q.shape[:3]
    cpu = q.device.type == "cpu"
    most = CPU_TILE if cpu else GPU_TILE
    if query_block is None:
        query_block = 256 if cpu else 1024
        if visible.cuts and visible.window is not None:
            # A tile holds window + query_block keys: a large block reads much that its mask hides.
            query_block = min(query_block, max(64, visible.window // 2))
    query_block = min(query_block, t)
    if key_block is None:
        key_block = max(128, most // (h * query_block))
        if visible.documents is not None:
            key_block = min(key_block, 256)  # what lies between two documents can only be skipped in whole tiles
    key_block = min(key_block, visible.total)
    return query_block, key_block, max(1, min(b, most // (h * query_block * key_block)))


class Blockwise(SoftmaxKernel):
    """query_block, key_block: most queries and keys of a tile; null chooses by shape and device.

    Raises UserError for a block below 1.
    """

    grouped = True

    def __init__(
        self,
        n_head: int,
        dropout: float = 0.0,
        soft_cap: float | None = None,
        sink: Sink = "none",
        query_block: int | None = None,
        key_block: int | None = None,
    ) -> None:
        super().__init__(n_head, dropout, soft_cap, sink)
        for name, value in (("query_block", query_block), ("key_block", key_block)):
            if value is not None and value < 1:
                raise UserError(f"attention.{name}={value} must be 1 or more; type attention.{name}=256, or null")
        self.query_block, self.key_block = query_block, key_block

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | Tensor,
        visible: Visibility,
        bias: Bias | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        blocks = self.query_block, self.key_block
        return tiled_attention(q, k, v, scale, visible, bias, self.soft_cap, self.sink, dropout, *blocks)
