"""What a Hugging Face model must keep: the properties of the contract that make sense for logits, by the same names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from softattn_lm.contract.property import Measure, close, difference, differs, same_bits


@dataclass(frozen=True)
class HFSubject:
    """`make(**config)` gives a fresh model in eval mode, always with the same weights.

    function: whether an attention function is on trial inside a model of ours, whose config may be changed.
    same_as_eager: whether its weights with `eager` attention must give the same. hint: what may be wrong if it fails.
    """

    name: str
    make: Callable[..., Any]
    function: bool
    same_as_eager: bool = True
    untried: dict[str, str] = field(default_factory=dict)
    hint: str = ""

    def text(self, rows: int, length: int, seed: int = 0) -> Tensor:
        n = self.make().config.vocab_size
        return torch.randint(3, n, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, idx: Tensor, **given: Any) -> Tensor:
    logits: Tensor = model(idx, use_cache=False, **given).logits
    return logits


def gradients_of(model: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Of the mean square logit, for every parameter."""
    parameters = list(model.parameters())
    return torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True, materialize_grads=True)


def hides_the_future(subject: HFSubject) -> Iterator[Measure]:
    for factor in (1.0, 1e6) if subject.function else (1.0,):
        model = subject.make()
        if factor != 1.0:
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.self_attn.q_proj.weight *= factor**0.5
                    layer.self_attn.k_proj.weight *= factor**0.5
        for training in (False, True):
            model.train(training)
            for length in (5, 33, 300):
                idx = subject.text(2, length)
                t = length // 2
                changed = idx.clone()
                changed[:, t:] = torch.where(idx[:, t:] == 3, 4, 3)
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    first = logits_of(model, idx)
                    torch.manual_seed(0)
                    second = logits_of(model, changed)
                place = f"T={length}, logits x {factor:g}, {'training' if training else 'eval'}"
                yield same_bits(first[:, :t], second[:, :t], f"before token {t}: {place}")
                yield differs(first[:, t], second[:, t], f"a token does not change its own logits: {place}")


def gradients(subject: HFSubject) -> Iterator[Measure]:
    model = subject.make()
    for length in (6, 40):
        x = model.get_input_embeddings()(subject.text(2, length)).detach().requires_grad_()
        t = length // 2
        y = model(inputs_embeds=x, use_cache=False).logits[:, t]
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        size = torch.autograd.grad((y * weight).sum(), x)[0].abs().sum((0, 2))  # (T,)
        yield Measure(size[t + 1 :].max().item(), 0.0, f"to the future of row {t} of {length}")
        yield Measure(float((size[: t + 1] == 0).sum()), 0.5, f"visible tokens without gradient, row {t} of {length}")


def prefix(subject: HFSubject) -> Iterator[Measure]:
    model = subject.make()
    for length, kept in ((9, 5), (137, 33), (300, 129)):
        idx = subject.text(2, length)
        with torch.no_grad():
            yield close(logits_of(model, idx[:, :kept]), logits_of(model, idx)[:, :kept], 2e-5, f"{kept} of {length}")


def batch_rows(subject: HFSubject) -> Iterator[Measure]:
    model = subject.make()
    for length in (9, 137):
        idx = subject.text(2, length)
        changed = idx.clone()
        changed[1] = idx[0]
        with torch.no_grad():
            yield same_bits(logits_of(model, changed)[0], logits_of(model, idx)[0], f"row 0, T={length}")


def cached(subject: HFSubject) -> Iterator[Measure]:
    model, idx = subject.make(), subject.text(2, 16)
    # Its name since transformers 5.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        full = logits_of(model, idx)
        for chunks in ([1] * 16, [5, 11], [7, 1, 1, 7]):
            past, parts = None, []
            for part in idx.split(chunks, dim=1):
                out = model(part, **{name: past}, use_cache=True)
                past = out[name]
                parts.append(out.logits)
            where = "one token at a time" if set(chunks) == {1} else f"chunks {'+'.join(map(str, chunks))}"
            yield close(torch.cat(parts, dim=1), full, 5e-5, where)


def padding(subject: HFSubject) -> Iterator[Measure]:
    model, idx = subject.make(), subject.text(2, 9)
    mask = torch.ones_like(idx)
    mask[0, :4] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        both = logits_of(model, idx, attention_mask=mask, position_ids=places)
        yield close(both[:1, 4:], logits_of(model, idx[:1, 4:]), 5e-5, "the row padded on the left")
        yield close(both[1:], logits_of(model, idx[1:]), 5e-5, "the whole row")


def greedy(subject: HFSubject) -> Iterator[Measure]:
    model, idx = subject.make(), subject.text(1, 6)
    given = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(idx), "pad_token_id": 0}
    with torch.no_grad():
        with_cache, without = (model.generate(idx, use_cache=use_cache, **given) for use_cache in (True, False))
    yield same_bits(with_cache, without, "24 tokens")


def eager(subject: HFSubject) -> Iterator[Measure]:
    """Logits and the gradient of every parameter, against the same weights with attn_implementation="eager"."""
    model = subject.make()
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    for length in (1, 5, 33, 137):
        idx = subject.text(2, length)
        found = []
        for one in (model, other):
            logits = logits_of(one, idx)
            found.append([logits.detach(), *gradients_of(one, logits)])
        names = ["logits", *(name for name, _ in model.named_parameters())]
        for name, a, b in zip(names, *found, strict=True):
            measure = close(a, b, 1e-4, f"{name}, T={length}, against eager")
            yield measure if subject.same_as_eager else replace(measure, allowed=torch.inf)


def scaling(subject: HFSubject) -> Iterator[Measure]:
    idx = subject.text(2, 9)
    results = []
    for value in (0.05, 2.0):
        model = subject.make()
        for layer in model.model.layers:
            layer.self_attn.scaling = value
        with torch.no_grad():
            results.append(logits_of(model, idx))
    yield differs(results[0], results[1], "scaling 0.05 against 2")


def dropout(subject: HFSubject) -> Iterator[Measure]:
    model, idx = subject.make(attention_dropout=0.5), subject.text(2, 16)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        quiet = logits_of(model, idx)
        yield same_bits(logits_of(model, idx), quiet, "two calls in eval")
        yield same_bits(logits_of(subject.make(), idx), quiet, "eval with dropout and a model without")
        model.train()
        yield differs(logits_of(model, idx), logits_of(model, idx), "two calls in training are equal")


def bfloat16(subject: HFSubject) -> Iterator[Measure]:
    idx = subject.text(2, 33)
    with torch.no_grad():
        model = subject.make().to(torch.bfloat16)
        rounded = logits_of(model, idx)
        precise = logits_of(model.float(), idx)
    yield Measure(difference(rounded, precise) / precise.abs().max().item(), 0.1, "T=33, relative to the largest logit")


MEASURES: dict[str, Callable[[HFSubject], Iterable[Measure]]] = {
    "fast_equals_weights": eager,
    "scales_are_honoured": scaling,
    "gradients_respect_the_mask": gradients,
    "prefix_is_stable": prefix,
    "batch_rows_are_independent": batch_rows,
    "dropout_is_for_training": dropout,
    "bfloat16_is_close": bfloat16,
    "model_hides_the_future": hides_the_future,
    "cached_equals_full": cached,
    "documents_are_apart": padding,
    "greedy_text_needs_no_cache": greedy,
}
