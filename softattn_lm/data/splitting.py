"""Which text is for training, which for validation, which for the test. The tokenizer is fitted afterwards.

contiguous: of n characters the first int(n·(1 - val - test)) train, the next up to int(n·(1 - test)) validate, the rest
tests; in exact decimal arithmetic. So val 0.1 and test 0 of Tiny Shakespeare are 1,003,854 and 111,540 characters.

document: whole documents. They are put in the order of their content's sha256; the first ones test until they hold the
test fraction of all bytes, the next ones validate likewise, the rest trains. Hence no seed, no dependence on the order
in which documents come, and equal documents are never on both sides.
"""

from fractions import Fraction

import numpy as np

from softattn_lm.data.spool import Span, Spool
from softattn_lm.errors import UserError


def split(spool: Spool, how: str, val_fraction: float, test_fraction: float) -> dict[str, list[Span]]:
    """{"train", "validation", "test"} -> spans of the spool. Raises UserError if a wanted split would be empty."""
    val, test = Fraction(str(val_fraction)), Fraction(str(test_fraction))
    spans = contiguous(spool, val, test) if how == "contiguous" else by_document(spool, val, test)
    for name, fraction in (("train", 1), ("validation", val), ("test", test)):
        if fraction > 0 and not spans[name]:
            holds = f"{len(spool.documents)} documents" if how == "document" else f"{spool.n_characters} characters"
            train = "data.split=contiguous" if how == "document" else "a longer text"
            instead = {"train": train, "validation": "data.val_fraction=0", "test": "data.test_fraction=0"}[name]
            raise UserError(f"data.split={how} leaves no text for {name}: there are {holds} only; use {instead}")
    return spans


def contiguous(spool: Spool, val: Fraction, test: Fraction) -> dict[str, list[Span]]:
    """Train, validation and test follow one another."""
    n = spool.n_characters
    first, second = (spool.position_of(int(n * kept)) for kept in (1 - val - test, 1 - test))
    bounds = {"train": (0, first), "validation": (first, second), "test": (second, spool.n_bytes)}
    return {name: [span] if span[0] < span[1] else [] for name, span in bounds.items()}


def by_document(spool: Spool, val: Fraction, test: Fraction) -> dict[str, list[Span]]:
    """Whole documents in their old order within each split."""
    n = len(spool.documents)
    if n == 0:
        return {"train": [], "validation": [], "test": []}
    ends = np.append(spool.documents[1:], spool.n_bytes)  # with the joiner behind each but the last
    sizes = ends - spool.documents
    order = np.argsort(spool.hashes, kind="stable")
    before = np.concatenate([[0], np.cumsum(sizes[order])[:-1]])  # bytes in front of each, in hash order
    # Equal documents share the place of the first of them.
    same = np.concatenate([[False], spool.hashes[order][1:] == spool.hashes[order][:-1]])
    before = np.maximum.accumulate(np.where(same, 0, before))
    total = spool.n_bytes
    chosen = np.empty(n, dtype=np.int8)
    chosen[order] = np.where(before < float(test) * total, 2, np.where(before < float(test + val) * total, 1, 0))
    spans = {}
    for code, name in enumerate(("train", "validation", "test")):
        numbers = np.flatnonzero(chosen == code)
        spans[name] = merged(spool.documents[numbers], ends[numbers])
        if spans[name] and numbers[-1] < n - 1:
            begin, end = spans[name][-1]
            spans[name][-1] = (begin, end - len(spool.joiner))  # nothing follows, so nothing is joined
    return {name: [span for span in found if span[0] < span[1]] for name, found in spans.items()}


def merged(begins: np.ndarray, ends: np.ndarray) -> list[Span]:
    """Neighbouring spans as one."""
    if len(begins) == 0:
        return []
    breaks = np.flatnonzero(begins[1:] != ends[:-1])
    first = np.concatenate([begins[:1], begins[1:][breaks]])
    last = np.concatenate([ends[:-1][breaks], ends[-1:]])
    return [(int(a), int(b)) for a, b in zip(first, last, strict=True)]
