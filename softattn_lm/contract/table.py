"""The table of variants for the README: what each states of itself, and what the contract says of it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable

import torch

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.contract.honoured import OPTIONS, ignored, refusals
from softattn_lm.contract.subject import D, H, Subject
from softattn_lm.contract.trial import trial

_AUTHORS = r"[A-Z][\w’'-]+(?: (?:and|&) [A-Z][\w’'-]+| et al\.)?"
_PAPER = re.compile(rf"({_AUTHORS} \d{{4}})(?: \([^)]*\))?,\s+arXiv:(\d{{4}}\.\d{{4,5}})")
GROUPS = 2  # key heads of the models whose cache is measured; like H and D, a number that stands for one thing only
_HEAD = ("attention", "formula", "source", "implementation", "refuses", "cache", "contract")


def tables(variants: Iterable[tuple[str, Subject]]) -> str:
    """Markdown. variants: (name, subject). Runs the whole contract on each."""
    rows, matrix = [], []
    for name, subject in variants:
        rows.append(_row(name, subject))
        refused, dropped = refusals(subject), ignored(subject)
        said = dict.fromkeys(OPTIONS, "yes") | dict.fromkeys(refused, "refused") | dict.fromkeys(dropped, "**ignored**")
        matrix.append((f"`{name}`", *said.values()))
    notes = (
        "`cache`: bytes per token and layer in float32, for H heads and G key heads of width D; `constant`: per layer, "
        "however many tokens it has read. `contract`: properties of softattn_lm/contract, of which those that need a "
        "backward pass or a state are not tried where there is none."
    )
    return "\n\n".join((_markdown(_HEAD, rows), notes, _markdown(("attention", *OPTIONS), matrix)))


def _row(name: str, subject: Subject) -> tuple[str, ...]:
    kernel = subject.kernel()
    kind = type(kernel)
    text = sys.modules[kind.__module__].__doc__ or ""
    papers = {number: paper for paper, number in _PAPER.findall(" ".join(text.split()))}
    file = kind.__module__.replace(".", "/") + ".py"
    own = kind.forward is not AttentionKernel.forward
    refused = "; ".join(f"{option}: {reason}" for option, reason in refusals(subject).items())
    verdicts = list(trial(subject))
    failed = [verdict.name for verdict in verdicts if not verdict.ok]
    untried = sum(not verdict.tried for verdict in verdicts)
    said = f"{len(verdicts) - untried} hold" + (f", {untried} not tried" if untried else "")
    return (
        f"`{name}`",
        _cell(_formula(text)),
        ", ".join(f"[{paper}](https://arxiv.org/abs/{number})" for number, paper in papers.items()),
        f"[{file.rpartition('/')[2]}]({file}), {'its own' if own else 'weights times values'}",
        _cell(refused) or "nothing",
        cache_size(subject),
        f"**fails: {', '.join(failed)}**" if failed else said,
    )


def _formula(text: str) -> str:
    """The first paragraph of a module's docstring, which states it."""
    first = inspect.cleandoc(text).split("\n\n")[0]
    return " ".join(first.split()).rstrip(",:")


def cache_size(subject: Subject) -> str:
    """Bytes per token and layer, or of a state, in letters."""
    model = subject.model(n_layer=1, n_kv_head=GROUPS)
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64), cache)
    rows = [(held.shape[1], held.shape[3], held.element_size()) for held in cache.streams(0).values()]
    if rows:
        return _in_letters(rows)
    state = cache.state(0, 1) or {}
    return "constant: " + _in_letters([(*held.shape[1:], held.element_size()) for held in state.values()])


def _in_letters(sizes: Iterable[tuple[int, ...]]) -> str:
    """Products of shapes and bytes, as "8·G·D + 4·H"."""
    letters = {GROUPS: "G", H: "H", D: "D"}
    found: dict[str, int] = {}
    for *shape, each in sizes:
        for size in shape:
            each *= 1 if size in letters else size
        product = "·".join(letters[size] for size in shape if size in letters)
        found[product] = found.get(product, 0) + each
    return " + ".join("·".join((str(number), *filter(None, [product]))) for product, number in found.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
