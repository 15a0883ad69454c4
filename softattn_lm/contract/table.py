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
        "`cache`: bytes per token and layer in float32, for G key heads of width D. `contract`: properties of "
        "softattn_lm/contract, of which those that need a backward pass are not tried where there is none."
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
        f"{_cache_bytes(subject) / (H * D):g}·G·D",
        f"**fails: {', '.join(failed)}**" if failed else said,
    )


def _formula(text: str) -> str:
    """The first paragraph of a module's docstring, which states it."""
    first = inspect.cleandoc(text).split("\n\n")[0]
    return " ".join(first.split()).rstrip(",:")


def _cache_bytes(subject: Subject) -> float:
    """Per token and layer, in float32."""
    model = subject.model()
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64), cache)
    return cache.bytes_per_token() / model.n_layer


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
