"""What a report consists of, and its tables as markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "−": r"$-$", "∞": r"$\infty$", "Δ": r"$\Delta$", "×": r"$\times$",
}  # fmt: skip


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Words:
    """A paragraph. strong: what is read first; warning: what is not to be overlooked."""

    text: str
    kind: str = "plain"  # plain, strong, warning, note


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Typed:
    """What to type."""

    text: str


@dataclass(frozen=True)
class Picture:
    """name: of the files figures/<name>.png and .svg."""

    name: str
    caption: str


@dataclass(frozen=True)
class Table:
    """Of texts; the first column is a name, the others are set to the right. marks: row -> a word for its colour."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    marks: Sequence[str] = ()


Block = Heading | Words | Bullets | Typed | Picture | Table


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {plain(block.text)}"
    if isinstance(block, Words):
        text = plain(block.text)
        return {"strong": f"**{text}**", "warning": f"> **Warning:** {text}"}.get(block.kind, text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {plain(item)}" for item in block.items)
    if isinstance(block, Typed):
        return f"```\n{block.text.replace('```', '')}\n```"
    if isinstance(block, Picture):
        return f"![{plain(block.caption)}](figures/{block.name}.png)"
    head = "| " + " | ".join(map(plain, block.head)) + " |"
    line = "|" + "|".join([" --- ", *[" ---: "] * (len(block.head) - 1)]) + "|"
    rows = ["| " + " | ".join(map(plain, row)) + " |" for row in block.rows]
    return "\n".join([head, line, *rows]) + (f"\n\n{plain(block.note)}" if block.note else "")


def plain(text: str) -> str:
    """No markup, in markdown or in HTML, comes out of a name or a question."""
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def as_csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def as_tex(table: Table) -> str:
    r"""A tabular between booktabs rules; \usepackage{booktabs} is all it needs."""
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
        r"\toprule",
        " & ".join(map(tex, table.head)) + r" \\",
        r"\midrule",
        *(" & ".join(map(tex, row)) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join([*lines, *([f"% {line}" for line in table.note.splitlines()])]) + "\n"


def tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)
