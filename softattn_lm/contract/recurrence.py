"""What a recurrent kernel must keep: decoding token by token is the training pass, in a memory that does not grow."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.kernel import AttentionKernel, State
from softattn_lm.attention.scale import LogLength
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.property import Measure, close, holds, not_tried, same_bits
from softattn_lm.contract.subject import D, H, Subject, features, inputs

NO_STATE = "it decodes from keys and has no state"
LONG = 300  # beyond the chunk of any kernel, and no multiple of one
PARTS = {"token by token": [1] * LONG, "a long text, then tokens": [LONG - 3, 1, 1, 1], "parts": [1, 63, 65, 130, 41]}

# One call: q, k, v and features of some tokens.
Tokens = tuple[Tensor, Tensor, Tensor, Tensor | None]


@holds("the recurrence agrees with the chunked form, token by token and in any parts, and its state keeps its size")
def recurrence_equals_forward(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    if not kernel.recurrent:
        yield not_tried(NO_STATE)
        return
    visible = Visibility(LONG)
    whole: Tokens = (*inputs(LONG), features(kernel, LONG))
    for scale in (D**-0.5, LogLength(D, H, 64)(visible)):
        with torch.no_grad():
            full = kernel(*whole[:3], scale=scale, visible=visible, features=whole[3])
            for name, lengths in PARTS.items():
                where = f"{name}, scale {'per query' if isinstance(scale, Tensor) else 'a number'}"
                yield from _carried(kernel, whole, full, scale, lengths, where)


def _carried(
    kernel: AttentionKernel, whole: Tokens, full: Tensor, scale: float | Tensor, lengths: list[int], where: str
) -> Iterator[Measure]:
    state: State | None = None
    start, sizes, ys = 0, set(), []
    for length in lengths:
        now = slice(start, start + length)
        q, k, v = (x[:, :, now] for x in whole[:3])
        given: dict[str, Any] = {"features": None if whole[3] is None else whole[3][:, :, now]}
        given["scale"] = scale[..., now, :] if isinstance(scale, Tensor) else scale
        before = {} if state is None else {name: held.clone() for name, held in state.items()}
        y, after = kernel.recur(q, k, v, state, **given)
        for name, held in before.items():
            assert state is not None
            yield same_bits(state[name], held, f"{name} of the state was changed in place, {where}")
        ys.append(y)
        sizes.add(tuple((name, tuple(held.shape)) for name, held in sorted(after.items())))
        start, state = start + length, after
    yield close(torch.cat(ys, dim=2), full, 2e-5, where)
    yield Measure(float(len(sizes) - 1), 0.0, f"sizes of the state beyond the first, {where}")


@holds("a state belongs to its row of the batch")
def states_are_independent(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    if not kernel.recurrent:
        yield not_tried(NO_STATE)
        return
    (q, k, v), made = inputs(70), features(kernel, 70)
    given: dict[str, Any] = {"scale": D**-0.5, "features": made}
    with torch.no_grad():
        _, both = kernel.recur(q, k, v, None, **given)
        _, other = kernel.recur(q, torch.cat((k[:1], k[1:] + 3.0)), torch.cat((v[:1], v[1:] - 3.0)), None, **given)
    for name, held in both.items():
        yield same_bits(other[name][:1], held[:1], f"{name}, another text in the second row")
