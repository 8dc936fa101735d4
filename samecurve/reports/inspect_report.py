"""HTML page of `inspect`, self-contained."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from samecurve.reports.data_inspection import Findings, PartStatistics, summary
from samecurve.reports.html import html_document, html_table

_STYLE = """
mark { background: var(--mark); color: inherit }
td.bar div { background: #4a7fb5; height: .8rem; display: inline-block }
.row { display: flex; height: 1.1rem; background: var(--grid); margin: 3px 0 }
.row div { background: #9fb6cf; border-right: 1px solid var(--paper); box-sizing: border-box }
.row div div { background: #57ab5a; height: 100%; border: 0 }
"""


def render_inspect_page(findings: Findings) -> str:
    return html_document(findings.title, _STYLE, _parts(findings))


def _parts(findings: Findings) -> Iterator[str]:
    yield "<p>Trained text is <mark>marked</mark>.</p>"
    for index, sample in enumerate(findings.samples):
        runs = [f"<mark>{escape(text)}</mark>" if trained else escape(text) for text, trained, _ in sample.runs]
        yield f"<h2>sample {index + 1}: {escape(summary(sample))}</h2>\n<pre>{''.join(runs)}</pre>"
    yield html_table(findings.details.items())
    for part in findings.parts:
        yield from _part(part, findings.sequence_length)


def _part(part: PartStatistics, sequence_length: int) -> Iterator[str]:
    yield f"<h2>{escape(part.name)}</h2>\n<table>"
    for name, value in part.counts.items():
        yield f"<tr><th>{escape(name)}<td>{escape(value)}"
    ends = ", ".join(f"<code>{escape(text) or 'cut off'}</code> {count:,}" for text, count in part.ends.items())
    if ends:
        yield f"<tr><th>last trained token<td>{ends}"
    yield "</table>\n<h3>Tokens per document</h3>\n<table>"
    most = max((count for _, _, count, _ in part.lengths), default=1)
    for low, high, count, truncated in part.lengths:
        note = f" ({truncated:,} truncated)" if truncated else ""
        bar = f'<div style="width: {count / max(most, 1) * 20:.2f}rem"></div>'
        yield f'<tr><th>{low:,}-{high - 1:,}<td class="bar">{bar} {count:,}{note}'
    yield "</table>\n<h3>The first rows</h3>\n<p>A block is a document; green is the share that is trained.</p>"
    for members in part.rows:
        blocks = []
        for size, trained in members:
            inner = f'<div style="width: {100 * trained / max(size, 1):.1f}%"></div>'
            style = f'style="width: {100 * size / sequence_length:.3f}%"'
            blocks.append(f'<div {style} title="{size} tokens, {trained} trained">{inner}</div>')
        yield f'<div class="row">{"".join(blocks)}</div>'
