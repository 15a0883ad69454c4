"""What a kernel must keep inside a model: with positions, masks, a cache, packed documents."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.pattern import Pattern
from softattn_lm.attention.projections import Separate
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt, LearnedPerHead, LogLength
from softattn_lm.attention.visibility import Causal
from softattn_lm.contract.property import Measure, close, differs, holds, not_tried, same_bits
from softattn_lm.contract.subject import Subject
from softattn_lm.position.alibi import ALiBi
from softattn_lm.position.base import Position
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from softattn_lm.position.sinusoidal import Sinusoidal

POSITIONS: dict[str, type[Position]] = {
    "rotary": Rotary,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "alibi": ALiBi,
    "none": NoPosition,
}
SCALES = {
    "inverse_sqrt": InverseSqrt,
    "inverse_dim": InverseDim,
    "constant": Constant,
    "learned": LearnedPerHead,
    "log_length": LogLength,
}


def masks(subject: Subject) -> dict[str, Any]:
    """Those that the subject honours, or the one it is composed with."""
    if "mask" in subject.settings:
        return {"its mask": subject.settings["mask"]}
    found = {"causal": Causal()}
    if subject.honours("window"):
        found["window 5"] = Causal(5)
    if subject.honours("sinks"):
        found["sinks 2 + window 4"] = Causal(4, sinks=2)
    return found


def positions(subject: Subject) -> dict[str, Any]:
    """Those that the subject honours, or the one it is composed with."""
    if "position" in subject.settings:
        return {"its position": subject.settings["position"]}
    return {name: policy for name, policy in POSITIONS.items() if name != "alibi" or subject.honours("bias")}


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(seed))


@holds(
    "in a model, tokens after t leave the logits up to t bitwise equal, for every mask and position, in training too"
)
def model_hides_the_future(subject: Subject) -> Iterator[Measure]:
    idx = text(2, 16)
    changed = idx.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    for where, position in positions(subject).items():
        for mask_name, mask in masks(subject).items():
            model = subject.model(position=position, mask=mask, **_extras(subject))
            for training in (False, True):
                model.train(training)
                with torch.no_grad():
                    first, second = model(idx), model(changed)
                place = f"{where}, {mask_name}, {'training' if training else 'eval'}"
                yield same_bits(first[:, :7], second[:, :7], place)
                yield differs(first[:, 7], second[:, 7], f"{place}: a token does not change its own logits")


@holds("decoding with the cache equals the full forward pass, for any chunking, mask, position and scale")
def cached_equals_full(subject: Subject) -> Iterator[Measure]:
    idx = text(2, 16)
    shapes = {
        f"{p}, {m}": {"position": position, "mask": mask}
        for p, position in positions(subject).items()
        for m, mask in masks(subject).items()
    }
    turned = "its position" if "position" in subject.settings else "rotary"
    if "scale" not in subject.settings:
        shapes |= {f"{turned}, scale {s}": {"position": Rotary, "scale": scale} for s, scale in SCALES.items()}
    shapes = {where: settings | {"smear": True} for where, settings in shapes.items()}
    shapes[f"{turned}, every part"] = {"position": Rotary, **_extras(subject)}
    for where, settings in shapes.items():
        model = subject.model(n_kv_head=2, **settings)
        with torch.no_grad():
            full = model(idx)
            for chunks in ([1] * 16, [5, 11], [7, 1, 1, 7]):
                cache = model.new_cache()
                cached = torch.cat([model(part, cache) for part in idx.split(chunks, dim=1)], dim=1)
                yield close(cached, full, 5e-5, f"{where}, chunks {_run_lengths(chunks)}")


@holds("beyond the context, decoding with the cache equals computing the text again under the same window")
def cached_equals_full_beyond_the_window(subject: Subject) -> Iterator[Measure]:
    refusal = _bounded(subject)
    if refusal:
        yield not_tried(f"a context is a window: {refusal}")
        return
    idx = text(2, 50)
    for where, position in positions(subject).items():
        for mask_name, mask in masks(subject).items():
            model = subject.model(position=position, mask=mask, smear=True)
            if model.absolute:
                yield not_tried(f"{where} stands still: text beyond the context is encoded again")
                continue
            with torch.no_grad():
                full = model(idx)
                for chunks in ([1] * 50, [13, 16, 1, 1, 1, 16, 2]):
                    cache = model.new_cache()
                    cached = torch.cat([model(part, cache) for part in idx.split(chunks, dim=1)], dim=1)
                    yield close(cached, full, 5e-5, f"{where}, {mask_name}, chunks {_run_lengths(chunks)}")


@holds("packed documents equal each document alone, and a ragged batch equals each of its texts, cached or not")
def documents_are_apart(subject: Subject) -> Iterator[Measure]:
    refusal = subject.refusal("documents")
    if refusal is None and not all(mask.documents for mask in _chosen_masks(subject)):
        refusal = "its mask keeps no documents apart"
    if refusal:
        yield not_tried(refusal)
        return
    idx = text(1, 14)
    lengths = [3, 6, 5]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    ragged = torch.where(torch.arange(9) < torch.tensor([[4], [0]]), -1, 0)
    variants = {"causal": Causal(documents=True)}
    if subject.honours("window"):
        variants["window 3"] = Causal(3, documents=True)
    if subject.honours("sinks"):
        variants["sinks 1 + window 2"] = Causal(2, sinks=1, documents=True)
    if "mask" in subject.settings:
        variants = masks(subject)
    for where, position in positions(subject).items():
        for mask_name, mask in variants.items():
            model = subject.model(position=position, mask=mask, scale=LogLength, **_extras(subject))
            place = f"{where}, {mask_name}"
            with torch.no_grad():
                alone = torch.cat([model(part) for part in idx.split(lengths, dim=1)], dim=1)
                yield close(model(idx, documents=documents), alone, 5e-5, f"packed, {place}")
                both = text(2, 9, seed=1)
                apart = [model(both[:1, 4:]), model(both[1:])]
                results = {"whole": model(both, documents=ragged)}
                # A cache keeps the first tokens of a row, and models refuse the two together.
                if not any(m.sinks for m in model.masks):
                    cache, parts = model.new_cache(), ((0, 6), (6, 7), (7, 9))
                    pieces = [model(both[:, a:b], cache, documents=ragged[:, a:b]) for a, b in parts]
                    results["cached"] = torch.cat(pieces, dim=1)
                for name, got in results.items():
                    yield close(got[:1, 4:], apart[0], 5e-5, f"ragged, {name}, {place}")
                    yield close(got[1:], apart[1], 5e-5, f"ragged, {name}, {place}")


@holds("the weights a model returns are those of its layers")
def returned_weights_are_used(subject: Subject) -> Iterator[Measure]:
    model = subject.model(n_kv_head=2)
    idx = text(2, 6)
    with torch.no_grad():
        logits, weights = model(idx, return_weights=True)
        yield same_bits(logits, model(idx), "logits")
        if any(model.recurrent):
            yield not_tried("with a cache, a state has no weights of past keys")
            return
        cache = model.new_cache()
        model(idx[:, :4], cache)
        _, last = model(idx[:, 4:], cache, return_weights=True)
    for layer, (a, b, mask) in enumerate(zip(weights, last, model.masks, strict=True)):
        # Of the earlier keys a cache keeps the sinks and as many as the window may still need.
        recent = b.shape[-1] - mask.sinks
        kept = torch.cat((a[:, :, 4:, : mask.sinks], a[:, :, 4:, a.shape[-1] - recent :]), dim=-1)
        yield close(b, kept, 1e-5, f"layer {layer}, cached")


@holds("greedy text is the same with and without the cache, over three contexts")
def greedy_text_needs_no_cache(subject: Subject) -> Iterator[Measure]:
    from softattn_lm.model.generate import generate

    # Without a window there is nothing beyond the context, but for a state, which reads everything.
    greedy = partial(generate, max_new_tokens=10 if _bounded(subject) else 48, temperature=0.0)
    for where, position in positions(subject).items():
        model = subject.model(position=position, smear=True)
        prompt = text(1, 6)[0].tolist()
        with_cache, without = (torch.tensor(list(greedy(model, prompt, use_cache=c))) for c in (True, False))
        yield same_bits(with_cache, without, where)


def _extras(subject: Subject) -> dict[str, Any]:
    """The parts around a kernel that reach beyond a token, but for those that the chosen projections refuse."""
    policy = subject.settings.get("projections", Separate)
    refused = getattr(policy, "func", policy).refuses
    extras = {
        "smear": True,
        "value_embeddings": True,
        "short_conv": 3,
        "value_residual": True,
        "output_gate": "element",
    }
    return {name: value for name, value in extras.items() if name not in refused}


def _bounded(subject: Subject) -> str | None:
    """Why it goes no further than the context: a layer that remembers keys cannot have a window over them."""
    reasons = (kernel.refuses.get("window") for kernel in subject.kernels() if not kernel.recurrent)
    return next((reason for reason in reasons if reason is not None), None)


def _chosen_masks(subject: Subject) -> list[Any]:
    mask = subject.settings.get("mask", Causal(documents=True))
    return mask.layers if isinstance(mask, Pattern) else [mask]


def _run_lengths(chunks: list[int]) -> str:
    return "1 x " + str(len(chunks)) if set(chunks) == {1} else "+".join(map(str, chunks))
