"""The same A as `formula`, by whichever implementation honours what is asked and is fastest; it says which and why.

The lengths below are where two implementations took the same time forward and backward on two CPU cores in float32
(`python scripts/benchmark.py attention`); a wrong guess costs time and never changes A.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softattn_lm.attention.bias import Bias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernels.blockwise import tiled_attention
from softattn_lm.attention.kernels.formula import Sink, SoftmaxKernel
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.visibility import Visibility

FORMULA_UP_TO = 128  # keys: below, a loop over tiles costs more than the matrix
DROPOUT_FROM = 512  # keys: torch drops weights on a CPU by forming the matrix
BIAS_FROM = 512
DOCUMENTS_FROM = 1024
WINDOWS_FROM = 4  # windows in the sequence: below, too little is skipped


class Choice(NamedTuple):
    name: str
    reason: str


class Auto(SoftmaxKernel):
    """choice, reason: of the last call with more than one query; before any, of a causal mask over the context."""

    grouped = True

    def __init__(
        self, n_head: int, context: int, dropout: float = 0.0, soft_cap: float | None = None, sink: Sink = "none"
    ) -> None:
        super().__init__(n_head, dropout, soft_cap, sink)
        self.fused = SDPA(dropout)
        here = "cuda" if torch.cuda.is_available() else "cpu"
        self.choice, self.reason = self.choose(Visibility(context), here)

    def choose(self, visible: Visibility, device: str, biased: bool = False) -> Choice:
        """device: "cpu", "cuda", "mps"; biased: whether something is added to scores."""
        return self._of_family(visible, device, biased) or self._of_plain(visible, device, biased)

    def explain(self, visible: Visibility, device: str, biased: bool) -> str:
        name, reason = self.choose(visible, device, biased)
        return f"{name}: {reason}"

    def _of_family(self, visible: Visibility, device: str, biased: bool) -> Choice | None:
        """With a soft cap or a sink, which the fused kernel does not know."""
        asked = [f"soft cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        asked += ["a sink"] if self.sink is not None else []
        if not asked:
            return None
        what = " and ".join(asked)
        if visible.new == 1 or visible.total <= FORMULA_UP_TO:
            return Choice("formula", f"{what}, {visible.new} x {visible.total} scores are few")
        if device == "cuda" and not self.dropout:
            return Choice("flex", f"{what} on CUDA")
        return Choice("blockwise", f"{what} over {visible.total} keys on {device}")

    def _of_plain(self, visible: Visibility, device: str, biased: bool) -> Choice:
        if visible.new == 1:
            return Choice("sdpa", "one query")
        long = self._worth_tiles(visible, biased)
        if device == "cuda" and not self.dropout and not (visible.is_plain_causal and not biased):
            return Choice("flex", "a mask or bias beyond the causal triangle on CUDA")
        if device == "cpu" and long:
            return Choice("blockwise", f"{long} on {device}")
        return Choice("sdpa", f"torch's fused kernel honours all of it on {device}")

    def _worth_tiles(self, visible: Visibility, biased: bool) -> str | None:
        total = visible.total
        if visible.cuts and visible.window is not None and total >= max(WINDOWS_FROM * visible.window, FORMULA_UP_TO):
            return f"a window of {visible.window} leaves most of {total} keys unread"
        if self.dropout and total >= DROPOUT_FROM:
            return f"dropout over {total} keys"
        if biased and total >= BIAS_FROM:
            return f"a bias over {total} keys"
        if visible.documents is not None and total >= DOCUMENTS_FROM:
            return f"documents in {total} keys"
        return None

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
        choice = self.choose(visible, q.device.type, bias is not None)
        if visible.new > 1:
            self.choice, self.reason = choice
        if choice.name == "sdpa":
            return self.fused(q, k, v, scale=scale, visible=visible, bias=bias)
        if choice.name == "formula":
            k, v = expand_groups(k, q.shape[1]), expand_groups(v, q.shape[1])
            return super().forward(q, k, v, scale=scale, visible=visible, bias=bias, features=features)
        if choice.name == "flex":
            # Imported only where it is used: with it comes torch's compiler.
            from softattn_lm.attention.kernels.flex import flex_softmax

            return flex_softmax(q, k, v, scale, visible, bias, self.soft_cap, self.sink)
        dropout = self.dropout if self.training else 0.0
        return tiled_attention(q, k, v, scale, visible, bias, self.soft_cap, self.sink, dropout)
