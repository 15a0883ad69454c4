"""What a recurrent kernel must keep: decoding token by token is the training pass, in a memory that does not grow."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.kernel import AttentionKernel, State
from softattn_lm.attention.scale import LogLength
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.property import Measure, close, difference, differs, holds, not_tried, same_bits
from softattn_lm.contract.subject import D, H, Subject, features, features_of, hidden, inputs

NO_STATE = "it decodes from keys and has no state"
LONG = 300  # beyond the chunk of any kernel, and no multiple of one
PARTS = {"token by token": [1] * LONG, "a long text, then tokens": [LONG - 3, 1, 1, 1], "parts": [1, 63, 65, 130, 41]}

# One call: q, k, v and features of some tokens.
Tokens = tuple[Tensor, Tensor, Tensor, Tensor | None]
# q, k, v and the block's input x, of which a kernel makes features call by call, as a cache has it do.
Text = tuple[Tensor, Tensor, Tensor, Tensor]

SHORT = (slice(0, 9), slice(9, 10), slice(10, 40))  # a text in parts
# (text, part): in turns, each once more from its start, and once more from a state that was already gone on from.
TURNS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 0), (1, 0), (0, 1), (1, 2))


@holds("the recurrence agrees with the chunked form, token by token and in any parts, and its state keeps its size")
def recurrence_equals_forward(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    if not kernel.recurrent:
        yield not_tried(NO_STATE)
        return
    visible = Visibility(LONG)
    for training, names in ((False, [*PARTS]), (True, ["parts"])):
        kernel.train(training)
        for scale in (D**-0.5, LogLength(D, H, 64)(visible)):
            with torch.no_grad():
                whole: Tokens = (*inputs(LONG), features(kernel, LONG))
                full = kernel(*whole[:3], scale=scale, visible=visible, features=whole[3])
                for name in names:
                    per = "per query" if isinstance(scale, Tensor) else "a number"
                    where = f"{name}, scale {per}, {_mode(training)}"
                    yield from _carried(kernel, whole, full, scale, PARTS[name], where)


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


@holds("a recurrence belongs to its row of the batch, from its start and from a state")
def states_are_independent(subject: Subject) -> Iterator[Measure]:
    if not subject.kernel().recurrent:
        yield not_tried(NO_STATE)
        return
    for training in (False, True):
        kernel = subject.kernel().train(training)
        for batch in (2, 3, 5):
            text = _text(40, batch=batch)
            with torch.no_grad():
                found = _read(kernel, text)
                for row in range(batch):
                    others = (torch.arange(batch) != row).float()
                    q, k, v, x = (part + 3.0 * others.reshape(-1, *[1] * (part.ndim - 1)) for part in text)
                    changed = _read(kernel, (q, k, v, x))
                    for name, held in found.items():
                        where = f"{name}, other texts beside row {row} of {batch}, {_mode(training)}"
                        yield same_bits(changed[name][row], held[row], where)


@holds("what a recurrence remembers is its state alone: texts read in turns, again or from their start do not meet")
def states_are_all_it_remembers(subject: Subject) -> Iterator[Measure]:
    if not subject.kernel().recurrent:
        yield not_tried(NO_STATE)
        return
    for training in (False, True):
        used = subject.kernel().train(training)
        for batches in ((1, 1), (2, 2), (1, 2)):
            texts = [_text(40, seed, batch) for seed, batch in enumerate(batches)]
            behind: dict[tuple[int, int], State] = {}
            with torch.no_grad():
                for number, part in TURNS:
                    text, state = texts[number], behind.get((number, part - 1))
                    # A copy, read by a kernel that has seen nothing else.
                    copied = None if state is None else {name: held.clone() for name, held in state.items()}
                    fresh = subject.kernel().train(training)
                    expected, after = _recur(fresh, text, SHORT[part], copied)
                    y, behind[number, part] = _recur(used, text, SHORT[part], state)
                    where = f"part {part} of a text in turns with another, {' and '.join(map(str, batches))} rows"
                    yield same_bits(y, expected, f"{where}, {_mode(training)}")
                    for name, held in after.items():
                        yield same_bits(behind[number, part][name], held, f"{name}, {where}, {_mode(training)}")
                    full = _forward(fresh, text)[:, :, SHORT[part]]
                    yield close(y, full, 2e-5, f"{where}, {_mode(training)}, against the whole")


@holds("a recurrence hides the later tokens of a call: earlier rows stay bitwise equal, in bfloat16 and training too")
def recurrence_hides_the_future(subject: Subject) -> Iterator[Measure]:
    if not subject.kernel().recurrent:
        yield not_tried(NO_STATE)
        return
    for training in (False, True):
        kernel = subject.kernel().train(training)
        for dtype in (torch.float32, torch.bfloat16):
            for length in (2, 5, 33, LONG):
                t = length // 2
                text = _text(length, dtype=dtype)
                step = (100.0 * (torch.arange(length) >= t)[:, None]).to(dtype)
                q, k, v, x = text
                later = (q + step, k - step, v - step, x - step.float())
                with torch.no_grad():
                    _, behind = _recur(kernel, _text(9, dtype=dtype), slice(9), None)
                    for start, state in (("the start", None), ("a state", behind)):
                        first, _ = _recur(kernel, text, slice(length), state)
                        second, _ = _recur(kernel, later, slice(length), state)
                        where = f"{t} of {length} from {start}, {_mode(training)}, {str(dtype)[6:]}"
                        yield same_bits(first[:, :, :t], second[:, :, :t], f"row before {where}")
                        yield differs(first[:, :, t:], second[:, :, t:], f"row does not see its own token: {where}")


@holds("the recurrence in bfloat16 is exact to its own precision, token by token and in parts")
def recurrence_is_close_in_bfloat16(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    if not kernel.recurrent:
        yield not_tried(NO_STATE)
        return
    text = _text(LONG, dtype=torch.bfloat16)
    with torch.no_grad():
        precise = _forward(kernel, text, torch.float32)
        for name, lengths in PARTS.items():
            state, start, ys = None, 0, []
            for length in lengths:
                y, state = _recur(kernel, text, slice(start, start + length), state)
                start += length
                ys.append(y)
            allowed = 3e-2 * max(1.0, precise.std().item())
            yield Measure(difference(torch.cat(ys, dim=2), precise), allowed, name)


def _text(length: int, seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.float32) -> Text:
    return *inputs(length, seed=seed, dtype=dtype, batch=batch), hidden(length, seed, batch)


def _recur(kernel: AttentionKernel, text: Text, now: slice, state: State | None) -> tuple[Tensor, State]:
    q, k, v = (part[:, :, now] for part in text[:3])
    return kernel.recur(q, k, v, state, scale=D**-0.5, features=features_of(kernel, text[3][:, now], q.dtype))


def _read(kernel: AttentionKernel, text: Text) -> dict[str, Tensor]:
    """Every y and every state of a text that is read in parts, by name."""
    state: State | None = None
    found: dict[str, Tensor] = {}
    for number, now in enumerate(SHORT):
        y, state = _recur(kernel, text, now, state)
        found |= {f"y of part {number}": y} | {f"{name} behind part {number}": held for name, held in state.items()}
    return found


def _forward(kernel: AttentionKernel, text: Text, dtype: torch.dtype | None = None) -> Tensor:
    """y of the whole text at once, of the same rounded numbers in `dtype`."""
    q, k, v, x = text
    made, dtype = features_of(kernel, x, q.dtype), dtype or q.dtype
    q, k, v = (part.to(dtype) for part in (q, k, v))
    made = None if made is None else made.to(dtype)
    y: Tensor = kernel(q, k, v, scale=D**-0.5, visible=Visibility(q.shape[2]), features=made)
    return y


def _mode(training: bool) -> str:
    return "training" if training else "eval"
