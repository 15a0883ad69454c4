"""A decode step of fixed shapes, which a CUDA graph can hold: one launch a token in the place of hundreds.

Keys and values of all positions of the context lie in buffers made once; a step writes its own at a position that is a
tensor, and hides what comes behind. On a CPU the same step runs without a graph.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from softattn_lm.attention.cache import KVCache
from softattn_lm.attention.kernels.sdpa import SDPA
from softattn_lm.attention.projections import Separate
from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.block import Block
from softattn_lm.model.decode import knows
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.layers import MLP
from softattn_lm.model.step_parts import Library, Reductions, Way
from softattn_lm.position.base import Rotation

WARM_UP = 3  # steps before a capture, as torch.cuda.graphs asks for
# Block sizes are searched for, as products of rows need it. A value that every row of a product reads is written down
# once it has two inputs, so that no row makes GELU of a sum anew. The graph is ours, and torch makes none.
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "realize_reads_threshold": 1, "triton.cudagraphs": False}


def fits(model: DecoderLM) -> bool:
    """Whether a step of fixed shapes computes what the model does, in a text no longer than its context."""
    plain = model.smear is None and all(
        type(block.attention.kernel) is SDPA and mask.span(model.context) >= model.context
        for block, mask in zip(model.layers, model.masks, strict=True)
    )
    return plain and knows(model)


class GraphedDecode:
    """Writes text of at most `model.context` tokens, by itself (`write`) or token by token, as Decode does.

    compiled: torch.compile makes the step of Reductions, which takes longer than hundreds of texts.
    Raises UserError for a model with parts it does not know.
    """

    def __init__(self, model: DecoderLM, batch: int = 1, compiled: bool = False) -> None:
        if not fits(model):
            raise UserError(
                "a graphed decode step knows attention=sdpa with projections=separate, and no window, position=alibi, "
                "scale=learned or log_length, smear, output_gate, short_conv or value_residual; type graph=false"
            )
        weight = model.embed.weight
        self.model, self.device = model, weight.device
        attention = model.layers[0].attention
        groups, head = attention.projections.n_kv_head, attention.out.in_features // attention.n_head
        shape = (batch, groups, model.context, head)
        self.way: Way = Reductions() if compiled else Library()
        # Tensors of their own: a compiler that finds several in one memory copies all of it at every write.
        keys = [torch.zeros(shape, dtype=weight.dtype, device=self.device) for _ in model.layers]
        self.cache = [(of_layer, self.way.values(of_layer)) for of_layer in keys]
        self.places = torch.arange(model.context, device=self.device)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.logits = torch.zeros(batch, model.vocab_size, dtype=dtype, device=self.device)
        whole = range(model.context)
        self.codes = next((code for p in model.position_per_layer if (code := p.embed(whole)) is not None), None)
        self.rotations = [p.rotation(whole) for p in model.position_per_layer]
        self.scales = [block.attention.scale(Visibility(1)) for block in model.layers]
        self.step = (
            torch.compile(self._step, fullgraph=True, dynamic=False, options=OPTIONS) if compiled else self._step
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            self._capture()
        self.go_to(0)

    def go_to(self, position: int) -> None:
        """The next token is the one at `position`, behind what the buffers hold of those before it."""
        self.length = position  # as `position`, which would have to be waited for
        self.position.fill_(position)

    def resume(self, cache: KVCache) -> None:
        """Go on behind what `cache` holds: one text for each sample, or one with which all of them begin."""
        places = self.places[: cache.length]
        for layer, (keys, values) in enumerate(self.cache):
            streams = cache.streams(layer)
            past = [cache.extend(layer, name, streams[name][..., :0, :]) for name in ("k", "v")]  # (B or 1, G, past, D)
            k, v = (rows.to(keys.dtype).expand(len(keys), -1, -1, -1) for rows in past)
            keys.index_copy_(2, places, k)
            self.way.keep(values, places, v)
        self.go_to(cache.length)

    def __call__(self, ids: Tensor) -> Tensor:
        """(B,) ids of the next token of each sample -> (B, V) logits of the one behind it, overwritten by the next.

        At most `model.context` tokens.
        """
        assert ids.shape == self.ids.shape[:1], (ids.shape, self.ids.shape)
        self.ids[:, 0] = ids
        self._run()
        return self.logits

    @torch.inference_mode()
    def write(self, prompt: Tensor, new: int) -> Tensor:
        """(B, P) int64 -> (B, new) int64, the likeliest token each time; 1 <= P, P + new <= context + 1."""
        assert len(prompt) == len(self.ids) and prompt.shape[1], (prompt.shape, self.ids.shape)
        assert prompt.shape[1] + new <= self.model.context + 1, (prompt.shape, new)
        text = prompt.new_empty(len(prompt), new)
        self.go_to(0)
        for place in range(prompt.shape[1] + new - 1):
            if place < prompt.shape[1]:
                self.ids.copy_(prompt[:, place : place + 1])
            self._run()
            if place >= prompt.shape[1] - 1:
                text[:, place - prompt.shape[1] + 1] = self.ids[:, 0]
        return text

    def _capture(self) -> None:
        with torch.inference_mode():
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    self.position.zero_()
                    self.step()
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def _run(self) -> None:
        assert self.length < self.model.context, (self.length, self.model.context)
        self.length += 1
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def _step(self) -> None:
        """Reads `ids` at `position`; leaves the likeliest next token and its position in them, and `logits`."""
        model = self.model
        x = model.embed(self.ids)  # (B, 1, C)
        if self.codes is not None:
            x = x + self.codes.index_select(0, self.position)
        if model.embed_norm is not None:
            x = model.embed_norm(x)
        seen = self.places <= self.position  # (S,)
        for layer, block in enumerate(model.layers):
            x = x + self._attend(layer, block, x, seen)
            if block.mlp is not None and block.mlp_norm is not None:
                x = x + self._transform(block.mlp, block.mlp_norm, x)
        # The norm by itself: so many rows as the head has would take longer to make it anew than a kernel takes.
        logits = self._linear(model.head, model.final_norm(x))[:, -1].to(self.logits.dtype)  # (B, V)
        if model.final_cap is not None:
            logits = model.final_cap * torch.tanh(logits / model.final_cap)
        self.logits.copy_(logits)
        self.ids.copy_(self.way.likeliest(logits))
        self.position.add_(1)

    def _attend(self, layer: int, block: Block, x: Tensor, seen: Tensor) -> Tensor:
        attention, (keys, values) = block.attention, self.cache[layer]
        projections = cast(Separate, attention.projections)
        linear, counts = projections.qkv, [projections.n_head, projections.n_kv_head, projections.n_kv_head]
        q, k, v = self.way.heads(x, block.attention_norm, linear.weight, linear.bias, counts)  # (B, H, 1, D)
        if block.value is not None:
            v = v + block.value(self.ids)
        turn = self._turn(self.rotations[layer])
        q, k = attention.q_norm(q), attention.k_norm(k)
        if turn is not None:
            q, k = turn(q), turn(k)
        keys.index_copy_(2, self.position, k.to(keys.dtype))
        self.way.keep(values, self.position, v.to(values.dtype))
        y = self.way.read(q.to(keys.dtype), keys, values, seen, self.scales[layer])
        return self._linear(attention.out, y.transpose(1, 2).flatten(2))

    def _transform(self, mlp: MLP, norm: nn.Module, x: Tensor) -> Tensor:
        gate = None if mlp.gate is None else self._linear(mlp.gate, x, norm)
        return self._linear(mlp.down, mlp.activated(self._linear(mlp.up, x, norm), gate))

    def _linear(self, linear: nn.Linear, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        return self.way.product(x, norm, linear.weight, linear.bias)

    def _turn(self, rotation: Rotation | None) -> Rotation | None:
        if rotation is None:
            return None
        return Rotation(rotation.cos.index_select(0, self.position), rotation.sin.index_select(0, self.position))
