"""Self-contained HTML pages without scripts or network access, for print, phones and dark mode."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --muted: #5f5f5f; --grid: #e5e5e5; --soft: #f5f5f5;
  --mark: #a6e3a1; --row: #fff0c2; --bad: #b00020; --run0: #0072b2; --run1: #d55e00 }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e4e4e4; --muted: #a3a3a3; --grid: #33363c; --soft: #22252b; --mark: #2f6b3a;
    --row: #4a3c10; --bad: #ff8a80; --run0: #56b4e9; --run1: #f0a04b } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--paper) }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem } h3 { font-size: 1rem }
table { border-collapse: collapse } .scroll { overflow-x: auto }
th { text-align: left; font-weight: 600; padding-right: 1.5rem; vertical-align: top }
td { padding-right: 1rem; vertical-align: top; overflow-wrap: break-word }
td:last-child { overflow-wrap: anywhere } tr.marked { background: var(--row) }
pre { background: var(--soft); padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
@media print { body { max-width: none; margin: 0; font-size: 11px } h2, h3 { break-after: avoid }
  tr { break-inside: avoid } }
"""


def html_document(title: str, style: str, parts: Iterable[str]) -> str:
    """Build a page.

    Args:
        title: plain text.
        style: additional CSS.
        parts: HTML, already escaped.
    """
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    start = f'<!doctype html>\n<html lang="en">{head}<title>{escape(title)}</title><style>{STYLE}{style}</style>'
    return "\n".join([start, f"<h1>{escape(title)}</h1>", *parts]) + "\n"


def html_table(rows: Iterable[Sequence[object]], header: Sequence[object] = (), marked: Container[int] = ()) -> str:
    """Build an HTML table.

    Args:
        rows: plain values; the first cell of each row is its heading.
        header: plain values of the header row; none if empty.
        marked: indices of the highlighted rows, from 0.
    """
    # HTML ends tr, th and td by itself
    lines = [f"<tr>{''.join(f'<th>{escape(str(cell))}' for cell in header)}"] if header else []
    for index, (name, *cells) in enumerate(rows):
        start = '<tr class="marked">' if index in marked else "<tr>"
        lines.append(f"{start}<th>{escape(str(name))}{''.join(f'<td>{escape(str(cell))}' for cell in cells)}")
    return "\n".join(['<div class="scroll"><table>', *lines, "</table></div>"])
