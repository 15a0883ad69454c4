"""The norm of vectors inside attention: heads of q, k and y, and the latent that they are made of."""

from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """(..., D) -> the same divided by its root mean square; with a gain in the gain's precision, which autocast
    keeps.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.weight is None else x.to(self.weight.dtype)).to(x.dtype)
