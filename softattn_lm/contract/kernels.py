"""What a kernel by itself must keep: (q, k, v) -> y = A(q, k) v."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softattn_lm.attention.bias import TensorBias
from softattn_lm.attention.cache import expand_groups
from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.differential import Differential
from softattn_lm.attention.kernels.formula import SoftmaxKernel
from softattn_lm.attention.scale import Constant, InverseDim, InverseSqrt, LearnedPerHead, LogLength, Scale
from softattn_lm.attention.visibility import Visibility
from softattn_lm.contract.property import Measure, close, difference, differs, holds, not_tried, same_bits
from softattn_lm.contract.subject import B, D, H, Subject, features, features_of, hidden, inputs, visibilities
from softattn_lm.errors import UserError

LENGTHS = (1, 5, 31, 33, 64, 127, 128, 129, 137)
LONG = 300  # beyond the query block of any kernel, and no multiple of one
LONGER = 1300  # beyond the key block of any kernel


def scales() -> list[Scale]:
    return [InverseSqrt(D), InverseDim(D), Constant(1.0), LearnedPerHead(D, H), LogLength(D, H, 64)]


def _trains(kernel: AttentionKernel) -> bool:
    return kernel.trains_on is None or "cpu" in kernel.trains_on


def _gradients(kernel: AttentionKernel, qkv: tuple[Tensor, ...], by_weights: bool, **given: Any) -> list[Tensor]:
    """y and its gradients for q, k, v, for the block's input x that features are made of, and for the kernel's own
    parameters, through `forward` or through `weights` @ v.

    y alone of a kernel that has no backward pass here.
    """
    trains = _trains(kernel)
    q, k, v, x = (tensor.clone().requires_grad_(trains) for tensor in (*qkv, hidden(qkv[1].shape[2])))
    with torch.set_grad_enabled(trains):
        given["features"] = features_of(kernel, x)
        y = kernel.weights(q, k, **given) @ v if by_weights else kernel(q, k, v, **given)
    if not trains:
        return [y]
    probe = torch.linspace(-1, 1, y.shape[-2] * y.shape[-1], dtype=y.dtype).reshape(y.shape[-2:])
    leaves = [q, k, v, x, *kernel.parameters()]
    found = torch.autograd.grad((y * probe).sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True))]


@holds("forward = weights @ v, in values and gradients, for every mask, at lengths around block sizes, in training too")
def fast_equals_weights(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    shapes = [(length, past) for length in LENGTHS for past in (0, 3)] + [(LONG, 0), (1, 63), (1, 200), (1, 511)]
    for training, new, past in [*((False, *shape) for shape in shapes), (True, 33, 0), (True, 33, 3)]:
        kernel.train(training)
        for mask, visible in visibilities(subject, new, past):
            given: dict[str, Any] = {"scale": D**-0.5, "visible": visible}
            fast, slow = (_gradients(kernel, inputs(new, past), by, **given) for by in (False, True))
            names = ["y", "dq", "dk", "dv", "dx", *(f"d{name}" for name, _ in kernel.named_parameters())]
            where = f"{mask}, T={new}, S={past + new}, {'training' if training else 'eval'}"
            for name, a, b in zip(names[: len(fast)], fast, slow, strict=True):
                yield close(a, b, 2e-5, f"{name}, {where}")


@holds("every scale policy acts as the formula says")
def scales_are_honoured(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for scale in scales():
        for new, past in ((9, 0), (1, 8), (6, 5)):
            visible = Visibility(new, past)
            given: dict[str, Any] = {"scale": scale(visible), "visible": visible}
            fast, slow = (_gradients(kernel, inputs(new, past), by, **given) for by in (False, True))
            for a, b in zip(fast, slow, strict=True):
                yield close(a, b, 2e-5, f"{type(scale).__name__}, T={new}, S={past + new}")
            # Whatever the scale is, it may as well be multiplied into the queries before.
            q, k, v = inputs(new, past)
            made = features(kernel, new, past)
            once = kernel(q * given["scale"], k, v, scale=1.0, visible=visible, features=made)
            where = f"{type(scale).__name__} against queries that are scaled before, T={new}"
            yield close(fast[0], once.detach(), 2e-5, where)
    if kernel.reads_scores and kernel.differentiable:
        q, k, v = inputs(9)
        made = features(kernel, 9)
        small, large = (kernel(q, k, v, scale=s, visible=Visibility(9), features=made) for s in (0.1, 3.0))
        yield differs(small, large, "scale 0.1 and 3 give the same")


@holds("a bias is added to scores, or refused")
def bias_is_honoured(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    refusal = subject.refusal("bias")
    if refusal:
        yield not_tried(refusal)
        return
    for new, past in ((7, 0), (7, 2), (1, 8), (40, 30), (150, 0)):
        values = torch.randn(H, new, past + new, generator=torch.Generator().manual_seed(0))
        q, k, v = inputs(new, past)
        visible, made = Visibility(new, past), features(kernel, new, past)
        given: dict[str, Any] = {"scale": 0.5, "visible": visible, "bias": TensorBias(values), "features": made}
        a = kernel.weights(q, k, **given)
        yield close(kernel(q, k, v, **given), a @ v, 2e-5, f"T={new}, S={past + new}")
        # The same as scores that already contain the bias: one more component of q that meets a key's own unit vector,
        # or two of them where every second component belongs to another lookup.
        each = 2 if isinstance(kernel, Differential) else 1
        added, own = (x.repeat_interleave(each, dim=-1) for x in (values, torch.eye(past + new)))
        wide_q = torch.cat((q * 0.5, added.expand(B, H, *added.shape[1:])), dim=-1)
        wide_k = torch.cat((k, own.expand(B, H, *own.shape)), dim=-1)
        # A cap acts on q kᵀ before the bias is added, so it is the one thing that tells the two apart.
        if not (isinstance(kernel, SoftmaxKernel) and kernel.soft_cap is not None):
            within = kernel.weights(wide_q, wide_k, scale=1.0, visible=visible, features=made)
            yield close(a, within, 2e-5, f"in scores, T={new}")


@holds("hidden keys have weight exactly 0, visible ones their due, and rows sum to what the kernel says")
def weights_are_proper(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for new, past in ((9, 0), (9, 4), (1, 6), (150, 50)):
        for mask, visible in visibilities(subject, new, past):
            q, k, _ = inputs(new, past)
            x = hidden(past + new)
            a = kernel.weights(q, k, scale=0.5, visible=visible, features=features_of(kernel, x))
            where = f"{mask}, T={new}, S={past + new}"
            readable = visible.dense().expand_as(a)
            yield Measure(
                a[~readable].abs().max().item() if (~readable).any() else 0.0, 0.0, f"weight on a hidden key, {where}"
            )
            total = a.sum(-1)
            some = readable.any(-1)
            if kernel.rows_sum_to == "one":
                yield close(total[some], torch.ones_like(total[some]), 1e-5, f"sum of a row, {where}")
            elif kernel.rows_sum_to == "at most one":
                yield Measure((total - 1).clamp_min(0).max().item(), 1e-5, f"sum of a row above 1, {where}")
            # A row is what it would be if the keys that it may read were all there are.
            for row in {0, new // 3, new // 2, new - 1}:
                for b in range(B):
                    seen = readable[b, 0, row].nonzero()[:, 0]
                    if len(seen):
                        q_row, k_seen = q[b : b + 1, :, row : row + 1], k[b : b + 1][:, :, seen]
                        given: dict[str, Any] = {"scale": 0.5, "visible": Visibility(1, len(seen) - 1)}
                        alone = kernel.weights(q_row, k_seen, **given, features=features_of(kernel, x[b : b + 1, seen]))
                        yield close(a[b : b + 1, :, row : row + 1][..., seen], alone, 1e-5, f"row {row} alone, {where}")


@holds("the future is invisible: later q, k, v leave earlier rows bitwise equal at the same shape")
def future_is_invisible(subject: Subject) -> Iterator[Measure]:
    for training in (False, True):
        kernel = subject.kernel().train(training)
        mode = "training" if training else "eval"
        for new, past in ((5, 0), (33, 0), (LONG, 0), (6, 9)):
            for factor in (1.0, 1e6):
                for dtype in (torch.float32, torch.bfloat16):
                    q, k, v = (x * factor if i == 0 else x for i, x in enumerate(inputs(new, past, dtype=dtype)))
                    t = new // 2
                    after = [x.clone() for x in (q, k, v)]
                    after[0][:, :, t:] += 100.0
                    for x in after[1:]:
                        x[:, :, past + t :] -= 100.0
                    x, later = hidden(past + new), hidden(past + new)
                    later[:, past + t :] -= 100.0
                    given: dict[str, Any] = {"scale": D**-0.5, "visible": Visibility(new, past)}
                    with torch.no_grad():
                        first = kernel(q, k, v, **given, features=features_of(kernel, x, dtype))
                        second = kernel(*after, **given, features=features_of(kernel, later, dtype))
                    where = f"{mode}, T={new}, S={past + new}, logits x {factor:g}, {str(dtype)[6:]}"
                    yield same_bits(first[:, :, :t], second[:, :, :t], f"row before {t}: {where}")
                    yield differs(first[:, :, t:], second[:, :, t:], f"row {t} does not see its own key: {where}")
    kernel = subject.kernel()
    before = [*inputs(LONGER), hidden(LONGER)]
    t = LONGER - 40
    step = 100.0 * (torch.arange(LONGER) >= t)[:, None]
    with torch.no_grad():
        first, second = (
            kernel(q, k, v, scale=D**-0.5, visible=Visibility(LONGER), features=features_of(kernel, x))
            for q, k, v, x in (before, [x + step for x in before])
        )
    yield same_bits(first[:, :, :t], second[:, :, :t], f"row before {t}: eval, T={LONGER}, S={LONGER}")


@holds("a key or a feature that is not a number, in the future, is not read")
def future_nan_keys_are_not_read(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for new in (5, 33, LONG):
        q, k, v = inputs(new)
        t = new // 2
        x, (poisoned, sick) = hidden(new), (k.clone(), hidden(new))
        poisoned[:, :, t + 1 :] = torch.nan
        sick[:, t + 1 :] = torch.nan
        given: dict[str, Any] = {"scale": D**-0.5, "visible": Visibility(new)}
        with torch.no_grad():
            first = kernel(q, k, v, **given, features=features_of(kernel, x))
            second = kernel(q, poisoned, v, **given, features=features_of(kernel, sick))
        yield same_bits(second[:, :, : t + 1], first[:, :, : t + 1], f"T={new}")


@holds("the gradient to future keys, values and features is exactly 0, and to visible ones it is not")
def gradients_respect_the_mask(subject: Subject) -> Iterator[Measure]:
    refusal = subject.refusal("training")
    if refusal:
        yield not_tried(refusal)
        return
    for new, past, training in ((6, 0, False), (40, 0, False), (40, 0, True), (5, 4, False), (5, 4, True)):
        kernel = subject.kernel().train(training)
        t = new // 2
        last = past + t  # the last key that row t may read
        total = torch.zeros(3, past + new)
        for probe in range(8):
            q, k, v, x = (x.requires_grad_() for x in (*inputs(new, past, seed=probe), hidden(past + new, probe)))
            made = features_of(kernel, x)
            y = kernel(q, k, v, scale=D**-0.5, visible=Visibility(new, past), features=made)
            weight = torch.randn(D, generator=torch.Generator().manual_seed(probe))
            loss = (y[:, :, t] * weight).sum()
            dk, dv, dx = torch.autograd.grad(loss, (k, v, x), allow_unused=True, materialize_grads=True)
            total += torch.stack([g.abs().sum((0, 1, 3)) for g in (dk, dv, dx[:, None])])
        place = f"row {t} of {new} behind {past} cached, {'training' if training else 'eval'}"
        yield Measure(total[:, last + 1 :].max().item(), 0.0, f"to the future of {place}")
        seen = total[1, : last + 1] if not kernel.reads_scores else total[:, : last + 1].sum(0)
        yield Measure(
            float((seen == 0).sum()),
            0.5 if kernel.reads_every_key else torch.inf,
            f"visible keys without gradient, {place}",
        )


@holds("a prefix gives the same in a shorter tensor")
def prefix_is_stable(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for new, kept in ((9, 5), (137, 33), (LONG, 64), (LONG, 129), (LONG, LONG - 1), (LONGER, LONG)):
        q, k, v = inputs(new)
        x = hidden(new)
        full = kernel(q, k, v, scale=D**-0.5, visible=Visibility(new), features=features_of(kernel, x))[:, :, :kept]
        q, k, v, made = q[:, :, :kept], k[:, :, :kept], v[:, :, :kept], features_of(kernel, x[:, :kept])
        short = kernel(q, k, v, scale=D**-0.5, visible=Visibility(kept), features=made)
        yield close(short, full, 1e-5, f"{kept} of {new}")


@holds("rows with nothing to read give 0, with gradients that are numbers")
def empty_rows_give_zero(subject: Subject) -> Iterator[Measure]:
    refusal = subject.refusal("documents")
    if refusal:
        yield not_tried(refusal)
        return
    kernel = subject.kernel()
    documents = torch.tensor([[-1, -1, 0, 0, 0], [0, 0, 0, -1, -1]])
    y, *gradients = _gradients(kernel, inputs(5), False, scale=0.5, visible=Visibility(5, documents=documents))
    empty = (documents < 0)[:, None, :, None].expand_as(y)
    yield Measure(y[empty].abs().max().item(), 0.0, "y of a padding row")
    for name, gradient in zip(("dq", "dk", "dv", "dx"), gradients, strict=False):
        yield same_bits(gradient, gradient.nan_to_num(), f"{name} is not a number")


@holds("gradients agree with finite differences in float64, or with the stated surrogate")
def gradients_are_right(subject: Subject) -> Iterator[Measure]:
    refusal = subject.refusal("training")
    if refusal:
        yield not_tried(refusal)
        return
    kernel = subject.kernel(width=4).double()
    q, k, v = (
        torch.randn(1, H, t, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(t)) for t in (3, 4, 4)
    )
    visible = Visibility(3, 1)
    if not kernel.differentiable:
        q, k = q.requires_grad_(), k.requires_grad_()
        surrogate: Any = kernel.surrogate
        given: dict[str, Any] = {"scale": 0.7, "visible": visible}
        stated = torch.autograd.grad((surrogate(q, k, **given) @ v).square().sum(), (q, k))
        # The chain rule at y: dL/dA is taken at the hard A and handed to the surrogate.
        y = kernel(q, k, v, **given)
        found = torch.autograd.grad(y, (q, k), grad_outputs=2 * (surrogate(q, k, **given) @ v).detach())
        for a, b in zip(found, stated, strict=True):
            yield close(a, b, 1e-10, "against the surrogate")
        return
    # Parameters are leaves too: gradcheck moves them in place.
    leaves = [q, k, v, hidden(4, batch=1, width=4).double()]
    parameters = list(kernel.parameters())

    def function(q: Tensor, k: Tensor, v: Tensor, x: Tensor, *_: Tensor) -> Tensor:
        return kernel(q, k, v, scale=0.7, visible=visible, features=features_of(kernel, x, torch.float64))

    try:
        torch.autograd.gradcheck(function, [*(x.requires_grad_() for x in leaves), *parameters])
        yield Measure(0.0, 1e-5, "q, k, v, x and parameters")
    except RuntimeError as error:  # gradcheck says so by raising
        yield Measure(torch.inf, 1e-5, str(error).splitlines()[0])


@holds("grouped heads equal repeated heads, neighbours sharing a group")
def grouped_heads_are_repeated(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for groups, new, past in ((1, 6, 2), (2, 6, 2), (2, 40, 20), (2, LONG, 0)):
        q, k, v = inputs(new, past, keys=groups)
        made = features(kernel, new, past)
        given: dict[str, Any] = {"scale": 0.5, "visible": Visibility(new, past), "features": made}
        # By hand: head h reads group h // (H / G).
        order = [h // (H // groups) for h in range(H)]
        expected = kernel.weights(q, k[:, order], **given) @ v[:, order]
        got = (
            kernel(q, k, v, **given) if kernel.grouped else kernel(q, expand_groups(k, H), expand_groups(v, H), **given)
        )
        yield close(got, expected, 2e-5, f"{groups} groups for {H} heads")


@holds("rows of a batch are independent, in training too, and each is what it would be alone")
def batch_rows_are_independent(subject: Subject) -> Iterator[Measure]:
    for training in (False, True):
        kernel = subject.kernel().train(training)
        for new, batch in ((9, 2), (9, 5), (137, 3)):
            before = [*inputs(new, batch=batch), hidden(new, batch=batch)]
            given: dict[str, Any] = {"scale": 0.5, "visible": Visibility(new)}
            for row in (0, batch - 1):
                changed = [x + 3.0 for x in before]
                for x, kept in zip(changed, before, strict=True):
                    x[row] = kept[row]
                alone = [x[row : row + 1] for x in before]
                with torch.no_grad():
                    first, second, single = (
                        kernel(q, k, v, **given, features=features_of(kernel, x))
                        for q, k, v, x in (before, changed, alone)
                    )
                where = f"row {row} of {batch}, T={new}, {'training' if training else 'eval'}"
                yield same_bits(second[row], first[row], where)
                yield close(single[0], first[row], 2e-5, f"{where}, alone")


@holds("exact in bfloat16 to its own precision")
def bfloat16_is_close(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for new, past in ((33, 0), (5, 7)):
        exact = inputs(new, past, dtype=torch.bfloat16)
        given: dict[str, Any] = {"scale": D**-0.5, "visible": Visibility(new, past)}
        with torch.no_grad():
            made = features(kernel, new, past, dtype=torch.bfloat16)
            rounded = kernel(*exact, **given, features=made)
            precise = kernel(*(x.float() for x in exact), **given, features=None if made is None else made.float())
        error = difference(rounded, precise)
        # Where A jumps, two precisions may fall on two sides of the jump.
        smooth = kernel.differentiable and kernel.reads_every_key
        # Weights that are not normalised make a sum of many values, and its error grows with it.
        allowed = 3e-2 * max(1.0, precise.std().item())
        yield Measure(error, allowed if smooth else torch.inf, f"T={new}, S={past + new}")


@holds("the same at other widths of a head: forward = weights @ v, and the future is invisible")
def widths_do_not_matter(subject: Subject) -> Iterator[Measure]:
    for width in (3, 16, 64):
        try:
            kernel = subject.kernel(width=width)
        except UserError as error:
            yield not_tried(f"D={width}: {error}")
            continue
        for new, past in ((64, 0), (7, 20)):
            q, k, v = inputs(new, past, width=width)
            made = features(kernel, new, past, width=width)
            given: dict[str, Any] = {"scale": width**-0.5, "visible": Visibility(new, past), "features": made}
            t = new // 2
            with torch.no_grad():
                y = kernel(q, k, v, **given)
                yield close(y, kernel.weights(q, k, **given) @ v, 2e-5, f"D={width}, T={new}, S={past + new}")
                later = [x + 100.0 * (torch.arange(x.shape[2]) >= x.shape[2] - new + t)[:, None] for x in (q, k, v)]
                where = f"row before {t}, D={width}, T={new}, S={past + new}"
                yield same_bits(kernel(*later, **given)[:, :, :t], y[:, :, :t], where)


@holds("a call leaves no trace: its inputs are unchanged, and what came before does not matter")
def calls_leave_no_trace(subject: Subject) -> Iterator[Measure]:
    kernel = subject.kernel()
    for new, past in ((9, 0), (64, 0), (1, 20)):
        q, k, v = inputs(new, past)
        given: dict[str, Any] = {"scale": 0.5, "visible": Visibility(new, past)}
        with torch.no_grad():
            made = features(kernel, new, past)
            mine = {"q": q, "k": k, "v": v} | ({} if made is None else {"features": made})
            kept = {name: x.clone() for name, x in mine.items()}
            first = kernel.eval()(**mine, **given)
            for name, x in mine.items():
                yield same_bits(x, kept[name], f"{name} was changed, T={new}")
            other = inputs(new, past, seed=1)
            kernel.train()(*(3 * x for x in other), **given, features=features(kernel, new, past, seed=1))
            yield same_bits(kernel.eval()(**mine, **given), first, f"after a training step on other text, T={new}")
