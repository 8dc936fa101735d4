"""Self-contained HTML pages without scripts or network access, for print and phones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem } h3 { font-size: 1rem }
table { border-collapse: collapse } .scroll { overflow-x: auto }
th { text-align: left; font-weight: 600; padding-right: 1.5rem; vertical-align: top }
td { padding-right: 1rem; vertical-align: top; overflow-wrap: break-word }
td:last-child { overflow-wrap: anywhere } tr.marked { background: #fff0c2 }
pre { background: #f5f5f5; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
@media print { body { max-width: none; margin: 0; font-size: 11px } h2, h3 { break-after: avoid }
  tr { break-inside: avoid } }
"""


def html_document(title: str, style: str, parts: Iterable[str]) -> str:
    """Build a page.

    Args:
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
