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
                raise UserError(f"attention.{name}={value} must be 1 or more; type attention.{name}=256, or null to have it chosen")
        self.query_block, self.key_block = query_block, key_block

    @torch.compiler.disable
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
        dtype = q.dtype
        if isinstance(scale, Tensor):
            q, scale = q * scale, 1.0  # autograd takes the gradient of the scale from that of q
        dropout = self.dropout if self.training else 0.0
        # Noise is drawn again in the backward pass, so it has a seed, taken from torch's own stream.
        seed = int(torch.randint(2**62, ()).item()) if dropout else 0
        tensors = learned(bias)
        settings = Settings(scale, visible, self.soft_cap, bias, tuple(tensors), dropout, seed, *self._blocks(q, visible))
        y: Tensor = TiledAttention.apply(settings, q, k, v, self.sink, *tensors.values())
        return y.to(dtype)

    def _blocks(self, q: Tensor, visible: Visibility) -> tuple[int, int, int]:
        """(queries, keys, rows of the batch) of a tile."""
        b, h, t = q.shape[:3]
        most = CPU_TILE if q.device.type == "cpu" else GPU_TILE
        query_block = self.query_block
        if query_block is None:
            query_block = 256 if q.device.type == "cpu" else 1024
            if visible.cuts and visible.window is not None:
                # A tile holds window + query_block keys: a large block reads much that its mask hides.
                query_block = min(query_block, max(64, visible.window // 2))
        query_block = min(query_block, t)
        key_block = min(self.key_block or max(128, most // (h * query_block)), visible.total)
        return query_block, key_block, max(1, min(b, most // (h * query_block * key_block)))
