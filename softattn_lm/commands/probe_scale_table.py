"""The tables of `softattn probe_scale`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from softattn_lm.evaluation.scale_law import QUANTILES
from softattn_lm.training.console import plain_console

Rows = list[dict[str, Any]]
# heading, key (a number is that of a quantile), shape
Column = tuple[str, str | int, str]

MIDDLE, LOW, HIGH = (QUANTILES.index(q) for q in (0.5, 0.05, 0.95))
NUMBER = "number"  # in six characters from 0.001 on
ROWS: list[Column] = [
    ("std s", "logit_std", NUMBER),
    ("H", "entropy", ".2f"),
    ("p max", "p_max", ".3f"),
    ("J 5%", LOW, ".0e"),
    ("J 50%", MIDDLE, ".0e"),
    ("J 95%", HIGH, ".0e"),
    ("dead", "dead", ".1%"),
]
WORDS = "H: entropy, nats; J: norm of the softmax Jacobian; dead: J below 1e-3"


def show_dictionary(rows: Rows, n_keys: int) -> None:
    columns: list[Column] = [
        ("β/T", "beta", "g"),
        ("|y − v|", "error", ".1e"),
        ("bound", "error_bound", ".1e"),
        ("p max", "p_max", ".4f"),
        ("floor", "p_floor", ".4f"),
        ("if tied", "tied_p_max", ".4f"),
    ]
    _show(f"{n_keys} orthonormal keys, query β k, |v| = 1", columns, rows, "beta", sections=False)


def show_drawn(rows: Rows, n_keys: int) -> None:
    columns: list[Column] = [
        ("d_k", "d_k", "d"),
        ("scale", "scale", ""),
        ("law", "logit_std_law", NUMBER),
        *ROWS,
        ("|g|", "gradient_mean", ".2f"),
        ("<1e-3", "gradient_dead", ".1%"),
    ]
    title = f"q and {n_keys} keys of N(0, 1) components"
    _show(title, columns, rows, "d_k", f"{WORDS}; g: ∂L/∂q where |∂L/∂y| = 1")


def show_blocks(rows: Rows, d_model: int) -> None:
    columns: list[Column] = [
        ("W_q W_k", "init", ""),
        ("d_k", "d_k", "d"),
        ("scale", "scale", ""),
        ("law", "logit_std_law", NUMBER),
        *ROWS,
    ]
    _show(f"blocks of width {d_model} at their start, layer-normed input", columns, rows, "d_k", WORDS)


def show_layers(rows: Rows, name: str) -> None:
    columns: list[Column] = [
        ("layer", "layer", "d"),
        ("scale", "scale", ""),
        ("law", "law", NUMBER),
        ROWS[0],
        ("max|s|", "logit_abs_max", NUMBER),
        ("bound", "bound", NUMBER),
        *ROWS[1:],
    ]
    title = f"{name}: the last query of each window"
    said = f"{WORDS}; p: |A| / Σ|A|\nlaw: std s if W_q, W_k and the input were independent"
    blind = {row["layer"]: row["kernel"] for row in rows if row["logit_abs_max"] is None}
    lines = "".join(f"\nlayer {layer}: {kernel} reads no scores, and no scale" for layer, kernel in blind.items())
    _show(title, columns, rows, "layer", said + lines)


def _show(
    title: str,
    columns: list[Column],
    rows: Rows,
    by: str,
    caption: str | None = None,
    sections: bool = True,
) -> None:
    """Policies that give the same factor share a row, which bears the name of the first; the caption has the others."""
    shared = {row["scale"] for row in rows if "," in row.get("scale", "")}
    same = "".join(f"\nthe same here: {names}" for names in sorted(shared))
    table = Table(title=Text(title), caption=Text((caption or "") + same), box=box.SIMPLE, padding=0, pad_edge=False)
    for heading, key, _ in columns:
        table.add_column(heading, justify="left" if key == "scale" else "right", no_wrap=True)
    ends = [sections and a[by] != b[by] for a, b in pairwise(rows)] + [False]
    for row, end in zip(rows, ends, strict=True):
        cells = (row["quantiles"][key] if isinstance(key, int) else row[key] for _, key, _ in columns)
        shown = (_cell(cell, shape) for cell, (_, _, shape) in zip(cells, columns, strict=True))
        table.add_row(*shown, end_section=end)
    plain_console().print(table)


def _cell(value: Any, shape: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.partition(",")[0]
    if shape == NUMBER:
        return format(value, ".3f" if abs(value) < 1 else ".3g")
    return format(value, shape)
