"""Kernels as a user writes them, outside the package: good ones, and ones that leak in one situation only."""

import torch
import torch.nn.functional as F

from softattn_lm.attention import AttentionKernel


class Sharp(AttentionKernel):
    """A = softmax(s · |s|^(p − 1)): asks for a shape of ours and takes an option of its own."""

    def __init__(self, head_dim: int, power: float = 1.5) -> None:
        super().__init__()
        assert head_dim > 0
        self.power = power

    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        precise = torch.promote_types(q.dtype, torch.float32)
        scores = scale * (q.to(precise) @ k.to(precise).transpose(-2, -1))
        if bias is not None:
            scores = scores + bias.tile().to(precise)
        # The small number keeps the slope finite at 0.
        scores = scores * (scores.square() + 1e-3) ** ((self.power - 1) / 2)
        readable = visible.dense()
        empty = ~readable.any(-1, keepdim=True)
        scores = scores.masked_fill(~readable, -torch.inf).masked_fill(empty, 0.0)
        return torch.softmax(scores, -1).masked_fill(empty, 0.0).to(q.dtype)


class Plain(AttentionKernel):
    """The softmax; the leaky ones change one thing."""

    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        scores = scale * (q @ k.transpose(-2, -1))
        if bias is not None:
            scores = scores + bias.tile().to(scores.dtype)
        readable = visible.dense()
        empty = ~readable.any(-1, keepdim=True)
        a = torch.softmax(scores.masked_fill(~readable, -torch.inf).masked_fill(empty, 0.0), -1)
        return a.masked_fill(empty, 0.0)


class LeaksInLongTexts(Plain):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y if q.shape[2] < 1000 else y + 1e-3 * v.mean(2, keepdim=True)


class LeaksWhileDecoding(Plain):
    def weights(self, q, k, *, visible, **given):
        a = super().weights(q, k, visible=visible, **given)
        return a + 1e-3 * (~visible.dense()).to(a.dtype) if visible.past else a


class LeaksInTraining(Plain):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y + 1e-3 * v[:, :, -1:] if self.training else y


class LeaksInLaterRows(Plain):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return torch.cat((y[:1], y[1:] + 1e-3 * v[1:, :, -1:]))


class LeaksBetweenRows(Plain):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y + 1e-3 * y.mean(0, keepdim=True)


class FiniteMask(Plain):
    """Nothing is hidden by −10⁴ once scores are larger, and a row with nothing to read gets the mean of all values."""

    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        scores = scale * (q @ k.transpose(-2, -1))
        if bias is not None:
            scores = scores + bias.tile().to(scores.dtype)
        return torch.softmax(scores.masked_fill(~visible.dense(), -1e4), -1)


class TopLeft(Plain):
    def forward(self, q, k, v, *, scale, visible, bias=None, features=None):
        if isinstance(scale, torch.Tensor) or bias is not None or visible.cuts or visible.documents is not None:
            return super().forward(q, k, v, scale=scale, visible=visible, bias=bias)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


class AddsMask(Plain):
    """NaN − ∞ is NaN: a key of the future is read after all."""

    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        readable = visible.dense()
        empty = ~readable.any(-1, keepdim=True)
        mask = torch.zeros(readable.shape, dtype=q.dtype).masked_fill(~readable & ~empty, -torch.inf)
        scores = scale * (q @ k.transpose(-2, -1)) + mask
        if bias is not None:
            scores = scores + bias.tile().to(scores.dtype)
        return torch.softmax(scores, -1).masked_fill(empty, 0.0)
