"""Autoregressive sampling: exactly N new tokens, with a cache that does not grow, beyond the context as well.

Where positions are absolute (a table), text beyond the context is encoded again from its last `context` tokens. Where
they are relative, the cache rolls: every token keeps the keys it was given when it came, and reads the last `context`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from softattn_lm.attention.cache import KVCache
from softattn_lm.errors import UserError
from softattn_lm.model.decode import Decode, knows
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.graphed import GraphedDecode

NOISE = 2**14  # random numbers drawn at once: a call costs more than a few hundred of them


def choose(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """(N, V) logits and (N, V) uniform numbers in [0, 1) -> (N,) ids. temperature 0 takes the likeliest.

    top_k keeps the k likeliest (ties with the k-th stay); top_p the fewest whose probability reaches p (Holtzman et al.
    2019, arXiv:1904.09751); min_p those with at least p times the likeliest one's (Nguyen et al. 2024,
    arXiv:2407.01082).
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    # The largest of logit + Gumbel noise is a draw from the softmax; one row of noise per sample keeps samples apart.
    noisy = logits - torch.log(-torch.log(uniform.clamp_min(1e-300)))
    if top_k is None and top_p is None and min_p is None:
        return noisy.argmax(-1)
    hidden = torch.zeros_like(logits, dtype=torch.bool)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        hidden |= logits < kth
    if top_p is not None:
        ordered, order = logits.masked_fill(hidden, -torch.inf).sort(descending=True, stable=True)
        p = ordered.softmax(-1)
        hidden |= torch.zeros_like(hidden).scatter(-1, order, p.cumsum(-1) - p >= top_p)
    if min_p is not None:
        p = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        hidden |= p < min_p * p.amax(-1, keepdim=True)
    return noisy.masked_fill(hidden, -torch.inf).argmax(-1)


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, n: int
) -> None:
    """Raises UserError naming the setting that makes no sense."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} writes nothing; type max_new_tokens=1 or more")
    if n < 1:
        raise UserError(f"n={n} is no number of samples; type n=1 or more")
    if not temperature >= 0:
        raise UserError(f"temperature={temperature} must be 0 (the likeliest token) or more, such as temperature=0.8")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} keeps no token; type top_k=1 or more, or top_k=null for all")
    for name, p in (("top_p", top_p), ("min_p", min_p)):
        if p is not None and not 0 < p <= 1:
            raise UserError(f"{name}={p} is a probability; type a number above 0 and up to 1, or {name}=null")


@torch.inference_mode()
def generate(
    model: DecoderLM,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    flat: bool = True,
    graph: bool = False,
    n: int = 1,
) -> Iterator[list[int]]:
    """Continue `ids` n times; yields the n new ids of each step. Sample i depends on (seed, i) and not on n.

    use_cache=False computes the same by running the model over the text again at every step; flat=False by running it
    over each new token, as models do that `decode` does not know; graph=True by steps of fixed shapes, on CUDA as a
    graph.
    The model is in eval mode while a token is computed, and in its own in between. Raises UserError for an empty
    prompt, and for a model or a text that a graph does not know.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p, min_p, n)
    if not ids:
        raise UserError("the prompt is empty; give at least one token, for example a line break")
    room = len(ids) + max_new_tokens
    if graph and (room > model.context or not use_cache):
        raise UserError(
            f"graph=true decodes from a cache within the context of {model.context} tokens, and prompt and text are "
            f"{room}; type max_new_tokens={max(1, model.context - len(ids))} and cache=true, or graph=false"
        )
    device = model.embed.weight.device
    noise = _Noise(seed, n, model.vocab_size, device)
    text = torch.tensor([ids] * n, device=device)  # (N, T)
    step = _Stepper(model, use_cache, room if graph or (flat and use_cache and knows(model)) else None, graph)
    fresh = text
    for _ in range(max_new_tokens):
        with _evaluated(model):
            logits = step(fresh)  # (N, V)
        fresh = choose(logits, logits if temperature == 0 else noise(), temperature, top_k, top_p, min_p)
        yield fresh.tolist()


@contextmanager
def _evaluated(model: DecoderLM) -> Iterator[None]:
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def in_bfloat16(model: DecoderLM) -> DecoderLM:
    """The same model with weights in bfloat16, half the bytes to read per token; angles and slopes stay in float32."""
    model.bfloat16()
    for position in model.positions:
        if not position.absolute:
            position.float()
    return model


class _Noise:
    """Each call answers with (N, V) uniform numbers in float64: row i is the next V of the generator of sample i."""

    def __init__(self, seed: int, n: int, vocab_size: int, device: torch.device) -> None:
        self.generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in range(n)]
        self.shape, self.device = (max(1, NOISE // (n * vocab_size)), vocab_size), device
        self.ahead: Iterator[Tensor] = iter(())

    def __call__(self) -> Tensor:
        drawn = next(self.ahead, None)
        if drawn is None:
            rows = [torch.rand(self.shape, generator=g, dtype=torch.float64) for g in self.generators]
            self.ahead = iter(torch.stack(rows, dim=1).to(self.device))
            drawn = next(self.ahead)
        return drawn


class _Stepper:
    """Takes new tokens (N, T), or one each (N,), and answers with the logits (N, V) of the next one. Keeps the text no
    longer than needed.

    room: tokens of the whole text if tokens behind the first call may be decoded flat; graph: and are, by fixed shapes.
    """

    def __init__(self, model: DecoderLM, use_cache: bool, room: int | None, graph: bool) -> None:
        self.model, self.absolute, self.room, self.graph = model, model.absolute, room, graph
        # Absolute positions: what is read is the last context; relative ones: whatever can still influence a logit.
        self.keep = model.context if self.absolute else model.receptive_field
        self.cache = model.new_cache() if use_cache else None
        self.flat: Decode | GraphedDecode | None = None
        self.text: list[Tensor] = []
        self.length = 0

    def __call__(self, fresh: Tensor) -> Tensor:
        model, context = self.model, self.model.context
        self.length += 1 if fresh.ndim == 1 else fresh.shape[1]
        if self.absolute and self.length > context:
            self.cache = self.flat = None
        if self.absolute or (self.cache is None and self.flat is None):
            self.text.append(fresh)
        if self.flat is not None:
            return self.flat(fresh)
        if self.cache is None:
            return self._again()
        if self.room is not None and self.cache.length:
            self.flat, self.cache = self._plan(self.cache, len(fresh), self.room), None
            return self.flat(fresh)
        # Every sample begins with the same prompt, and a plan copies the keys of one text to all.
        read = fresh if self.room is None else fresh[:1]
        for chunk in read.view(len(read), -1).split(context, dim=1):
            logits = model(chunk, self.cache)
        return logits[:, -1].expand(len(fresh), -1)

    def _plan(self, cache: KVCache, batch: int, room: int) -> Decode | GraphedDecode:
        if self.graph:
            graphed = GraphedDecode(self.model, batch)
            graphed.resume(cache)
            return graphed
        return Decode(self.model, cache, batch, min(room, self.model.context) if self.absolute else room)

    def _again(self) -> Tensor:
        """The whole text that counts, read anew."""
        text = torch.cat([part.view(len(part), -1) for part in self.text], dim=1)
        text = text if self.keep is None else text[:, -self.keep :]
        self.text = [text]
        return self.model(text, start=0 if self.absolute else self.length - text.shape[1])[:, -1]
