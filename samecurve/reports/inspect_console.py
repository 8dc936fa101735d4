"""Console output of `inspect`: coloured on a terminal, plain lines in a file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.text import Text

from samecurve.config.schema import Recipe
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.reports.data_inspection import PartStatistics, ShownSample, inspect, summary
from samecurve.reports.html import html_document
from samecurve.storage.atomic import write_text
from samecurve.storage.terminal import TextConsole
from samecurve.tasks import registry

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
    console, page = TextConsole(), ["<p>Trained text is <mark>marked</mark>.</p>"]
    for index, sample in enumerate(findings.samples):
        heading = f"sample {index + 1}: {summary(sample)}"
        console.print(f"\n{heading}")
        console.print(marked(sample, console.is_terminal))
        runs = [f"<mark>{escape(text)}</mark>" if trained else escape(text) for text, trained, _ in sample.runs]
        page.append(f"<h2>{escape(heading)}</h2>\n<pre>{''.join(runs)}</pre>")
    counts = [f"{name:<{LABEL_WIDTH + 8}}{value}" for name, value in findings.details.items()]
    counts += [line for part in findings.parts for line in ("", *lines(part, findings.sequence_length))]
    console.print("\n".join(["", *counts]))
    if html:
        page.append("<h2>All rows</h2>\n<pre>{}</pre>".format(escape("\n".join(counts))))
        write_text(html, html_document(title, "mark { background: #a6e3a1; color: inherit }", page))
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
        bar, note = "█" * round(40 * count / max(most, 1)), f" ({too_long:,} too long)" if too_long else ""
        yield f"  {f'{low:,}-{high - 1:,}':>{LABEL_WIDTH - 2}}  {bar} {count:,}{note}"
    yield f"  the first {len(part.rows)} rows, {sequence_length} tokens wide"
    for index, members in enumerate(part.rows):
        number = f"{len(members)} document{'s' * (len(members) > 1)}"
        yield f"  {index:>{LABEL_WIDTH - 2}}  {bar_of(members, sequence_length)} {number}"


def bar_of(sizes: list[int], sequence_length: int) -> str:
    """Draw a row as a bar of BAR_WIDTH characters, with padding as dots."""
    bar, place = "", 0
    for index, size in enumerate(sizes):
        place += size
        # counted from the start of the row, so that rounding errors do not add up
        bar += BLOCKS[index % 2] * (round(place * BAR_WIDTH / sequence_length) - len(bar))
    return bar.ljust(BAR_WIDTH, "·")
