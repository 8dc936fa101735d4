"""Console output of `inspect`: coloured on a terminal, plain lines in a file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.text import Text

from samecurve.config.schema import Recipe
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.reports.data_inspection import Findings, PartStatistics, ShownSample, inspect, summary
from samecurve.reports.html import html_document, html_table
from samecurve.storage.atomic import write_text
from samecurve.storage.terminal import TextConsole
from samecurve.tasks import registry

_STYLE = """
mark { background: #a6e3a1; color: inherit }
td.bar div { background: #4a7fb5; height: .8rem; display: inline-block }
.row { display: flex; height: 1.1rem; background: #e5e5e5; margin: 3px 0 }
.row div { background: #9fb6cf; border-right: 1px solid #fff; box-sizing: border-box }
.row div div { background: #57ab5a; height: 100%; border: 0 }
"""

TRAINED = "black on green"
BAR_WIDTH = 64
LABEL_WIDTH = 22
BLOCKS = "█▓"  # neighbours in a row differ


def run(recipe: Recipe, title: str, num_samples: int, html: Path | None) -> int:
    """Run the command `inspect`. Returns the exit code.

    Args:
        html: where to write the HTML page; None for none.
    """
    task, refused = _load_also_few_rows(recipe)
    findings = inspect(title, task, num_samples)
    findings.details.update({"training would refuse": refused} if refused else {})
    console = TextConsole()
    for index, sample in enumerate(findings.samples):
        console.print(f"\nsample {index + 1}: {summary(sample)}")
        console.print(marked(sample, console.is_terminal))
    console.print()
    for name, value in findings.details.items():
        console.print(f"{name:<{LABEL_WIDTH + 8}}{value}")
    for part in findings.parts:
        console.print("\n".join(["", *lines(part, findings.sequence_length)]))
    if html:
        write_text(html, render_inspect_page(findings))
        console.print(f"\n{html}")
    return 0


def _load_also_few_rows(recipe: Recipe) -> tuple[Task, str]:
    """Load the task, also of data that are too few to train on or to hold out some.

    Returns:
        (task, why training would refuse the data): "" if it would not.

    Raises:
        DataError: there is no row to show.
    """
    try:
        return registry.load_task(recipe), ""
    except DataError as error:
        batch = recipe.batch.model_copy(update={"global_batch_size": 1})
        data = recipe.data.model_copy(update={"validation_fraction": 0.0})
        return registry.load_task(recipe.model_copy(update={"batch": batch, "data": data})), str(error)


def marked(sample: ShownSample, colours: bool) -> Text:
    """Mark trained text by colour, or by ⟦ and ⟧ if colours are not available."""
    text = Text()
    for piece, trained, _ in sample.runs:
        if trained and not colours:
            piece = f"⟦{piece}⟧"
        text.append(piece, style=TRAINED if trained and colours else None)
    return text


def lines(part: PartStatistics, sequence_length: int) -> Iterator[str]:
    yield part.name
    for name, value in part.counts.items():
        yield f"  {name:<{LABEL_WIDTH}}{value}"
    ends = [f"{text!r} {count:,}" for text, count in part.ends.items() if text][:5]
    ends += [f"cut off {part.ends['']:,}"] if "" in part.ends else []
    if ends:
        yield f"  {'last trained token':<{LABEL_WIDTH}}{', '.join(ends)}"
    yield "  tokens per document"
    most = max((count for _, _, count, _ in part.lengths), default=1)
    for low, high, count, too_long in part.lengths:
        bar = "█" * round(40 * count / max(most, 1))
        yield f"  {f'{low:,}-{high - 1:,}':>{LABEL_WIDTH - 2}}  {bar} {count:,}" + (
            f" ({too_long:,} too long)" if too_long else ""
        )
    yield f"  the first {len(part.rows)} rows, {sequence_length} tokens wide"
    for index, members in enumerate(part.rows):
        number = f"{len(members)} document{'s' * (len(members) > 1)}"
        yield f"  {index:>{LABEL_WIDTH - 2}}  {bar_of(members, sequence_length)} {number}"


def bar_of(members: list[tuple[int, int]], sequence_length: int) -> str:
    """Draw a row as a bar of BAR_WIDTH characters, with padding as dots."""
    bar, place = "", 0
    for index, (size, _) in enumerate(members):
        place += size
        # counted from the start of the row, so that rounding errors do not add up
        bar += BLOCKS[index % 2] * (round(place * BAR_WIDTH / sequence_length) - len(bar))
    return bar.ljust(BAR_WIDTH, "·")


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
    for low, high, count, too_long in part.lengths:
        note = f" ({too_long:,} too long)" if too_long else ""
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
