"""report.html: one file that needs no other, loads nothing and runs nothing.

Text is escaped; figures are images in data URIs, in which a browser runs no script either; a policy at the head forbids
both once more.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from softattn_lm.ablation.tables import Block, Bullets, Heading, Picture, Table, Typed, Words

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c2430; margin: 0;
  background: #f4f5f7; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 36px 60px; background: #fff; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 10px; }
h2 { font-size: 18px; margin: 34px 0 10px; padding-bottom: 4px; border-bottom: 1px solid #dfe3e8; }
h3 { font-size: 15px; margin: 22px 0 6px; }
p { margin: 8px 0; }
p.strong { font-weight: 600; }
p.note { color: #5a6675; font-size: 13.5px; }
p.warning { background: #fff5e0; border-left: 4px solid #d98a00; padding: 8px 12px; }
pre { background: #f1f3f5; padding: 9px 12px; overflow-x: auto; font-size: 13px; }
.wide { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid #e6e9ed; }
th { background: #f1f3f5; font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
td.better { color: #126b3a; font-weight: 600; }
td.worse { color: #a5281b; font-weight: 600; }
td.equivalent, td.identical { color: #2b5c9e; font-weight: 600; }
td.undetermined { color: #6a6f76; font-weight: 600; }
figure { margin: 16px 0; }
img { max-width: 100%; }
figcaption { color: #5a6675; font-size: 13.5px; }
@media print { body { background: #fff; } main { padding: 0; } }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, blocks: Sequence[Block], figures: Path) -> str:
    """figures: the folder of the .svg files."""
    body = "\n".join(_element(block, figures) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body><main>\n{body}\n</main></body>\n</html>\n"
    )


def _element(block: Block, figures: Path) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Words):
        return f'<p class="{escape(block.kind)}">{escape(block.text)}</p>'
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Typed):
        return f"<pre>{escape(block.text)}</pre>"
    if isinstance(block, Picture):
        data = base64.b64encode((figures / f"{block.name}.svg").read_bytes()).decode("ascii")
        caption = escape(block.caption)
        source = f"data:image/svg+xml;base64,{data}"
        return f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'
    return _table(block)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    marks = [*table.marks, *[""] * (len(table.rows) - len(table.marks))]
    rows = "".join(
        "<tr>"
        + "".join(f'<td class="{escape(mark if cell == mark else "")}">{escape(cell)}</td>' for cell in row)
        + "</tr>"
        for row, mark in zip(table.rows, marks, strict=True)
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
