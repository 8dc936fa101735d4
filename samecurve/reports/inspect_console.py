"""`inspect`: a task's data, token by token, with counts over all documents and their packing.

Coloured on a terminal, plain lines in a file; the same lines on a page. No model is needed. The inspection reads the
same rows as a training run, so it cannot differ from the trained data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from samecurve.config.schema import Recipe
from samecurve.data.datasets.base import PackedRows, Rows, SampleRows, TruncatedRows, truncate
from samecurve.data.datasets.packed_samples import PackedSampleRows
from samecurve.data.datasets.preference import JudgedRows, PairRows
from samecurve.data.datasets.retrieval import RetrievalRows
from samecurve.data.datasets.text import LabelledRows, TaggedRows, TextRows
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.reports.html import html_document
from samecurve.storage.atomic import write_text
from samecurve.storage.terminal import TextConsole
from samecurve.tasks import registry
from samecurve.tasks.classify import ClassifyTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN_ROWS = 6
TRAINED = "black on green"
BAR_WIDTH = 64
LABEL_WIDTH = 22
BLOCKS = "█▓"  # neighbours in a row differ


@dataclass(frozen=True)
class ShownSample:
    """One text of the data, split by whether tokens are trained.

    Attributes:
        runs: (text, trained, number of tokens) of consecutive tokens that are all trained or all not trained.
        lost: number of tokens cut off.
        label: class of the whole text, for a task that trains on it.
        role: the text's role in its row, for rows of several texts.
    """

    runs: list[tuple[str, bool, int]]
    lost: int = 0
    label: str = ""
    role: str = ""


def run(recipe: Recipe, title: str, num_samples: int, html: Path | None) -> int:
    """Run the command `inspect`. Returns the exit code.

    A sample is a row if each row is one text. From rows of several texts, all texts are shown.

    Args:
        num_samples: how many rows of the training part are shown token by token.
        html: where to write the HTML page; None for none.
    """
    refused = ""
    try:
        task = registry.load_task(recipe)
    except DataError as error:  # too few data to train on, or to hold out some, are shown all the same
        refused = str(error)
        batch = recipe.batch.model_copy(update={"global_batch_size": 1})
        data = recipe.data.model_copy(update={"validation_fraction": 0.0})
        task = registry.load_task(recipe.model_copy(update={"batch": batch, "data": data}))
    named = []
    for name, rows in (("train", task.train), ("held out", task.validation)):
        parts = rows.parts if rows is not None else ()
        named += [(f"{name}, source {at}" if len(parts) > 1 else name, part) for at, part in enumerate(parts)]
    first = named[0][1]
    texts, texts_per_row = _texts(first), len(_roles(first)) or 1
    num_texts = len(texts) if isinstance(texts, TextRows) else _num_documents(texts)
    console, page = TextConsole(), ["<p>Trained text is <mark>marked</mark>.</p>"]
    for index in range(min(num_samples * texts_per_row, num_texts)):
        sample = _sample(task, texts, index)
        heading = f"sample {index + 1}: {summary(sample)}"
        console.print(f"\n{heading}")
        console.print(marked(sample, console.is_terminal))
        runs = [f"<mark>{escape(text)}</mark>" if trained else escape(text) for text, trained, _ in sample.runs]
        page.append(f"<h2>{escape(heading)}</h2>\n<pre>{''.join(runs)}</pre>")
    facts = {name: value for name, value in task.describe().items() if name not in ("train", "held_out")}
    facts |= {"training would refuse": refused} if refused else {}
    counts = [f"{name.replace('_', ' '):<{LABEL_WIDTH + 8}}{_text(value)}" for name, value in facts.items()]
    for name, rows in named:
        counts += ["", *_lines(name, rows, task.tokenizer)]
    console.print("\n".join(["", *counts]))
    if html:
        page.append("<h2>All rows</h2>\n<pre>{}</pre>".format(escape("\n".join(counts))))
        write_text(html, html_document(title, "mark { background: #a6e3a1; color: inherit }", page))
        console.print(f"\n{html}")
    return 0


def _roles(rows: Rows) -> tuple[str, ...]:
    """Return the roles of the texts in a row, () if a row is a single text."""
    if isinstance(rows, PairRows):
        return ("chosen", "rejected")
    return rows.roles if isinstance(rows, RetrievalRows) else ()


def _texts(rows: Rows) -> Rows:
    """Split rows of several texts into one row per text; other rows are returned unchanged."""
    if isinstance(rows, PairRows | JudgedRows):
        return rows.answers()
    return rows.texts() if isinstance(rows, RetrievalRows) else rows


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(count)}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _num_documents(rows: Rows) -> int:
    return len(rows.stream.offsets) - 1


def _document(rows: Rows, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, mask of trained tokens). The first token is never trained, because nothing precedes it."""
    start, end = rows.stream.offsets[index : index + 2]
    tokens = np.asarray(rows.stream.tokens[start:end])
    trained = np.ones(len(tokens), dtype=bool)
    if rows.stream.trained is not None:
        trained = np.asarray(rows.stream.trained[start:end]) > 0
    trained[:1] = False
    return tokens, trained


def _kept(rows: SampleRows, length: int) -> slice:
    """Return the tokens that a row holds of a document; the last one is only a target."""
    skipped, kept = truncate(np.array([length]), rows.limit, rows.truncation)
    return slice(int(skipped[0]), int(skipped[0] + kept[0]))


def _sample(task: Task, rows: Rows, index: int) -> ShownSample:
    label, lost, roles = "", 0, _roles(task.train.parts[0])
    role = roles[index % len(roles)] if roles else ""
    if isinstance(rows, TextRows):
        arrays, size = rows[np.array([index])], int(rows.sizes[index])
        tokens = arrays.inputs["input_ids"][0, :size]
        if isinstance(rows, LabelledRows):
            trained = np.zeros(size, dtype=bool)
            if not role:
                assert isinstance(task, ClassifyTask)  # the texts of other tasks have a role
                label = task.label_of(rows, index)
        else:
            labels = arrays.labels[0, :size]
            trained = labels != IGNORE_INDEX
            if not isinstance(rows, TaggedRows):  # what is masked in the input is taken from the labels
                tokens = np.where(trained, labels, tokens)
    else:
        tokens, trained = _document(rows, index)
        if isinstance(rows, SampleRows):
            span = _kept(rows, len(tokens))
            lost = len(tokens) - (span.stop - span.start)
            tokens, trained = tokens[span], trained[span]
            trained[:1] = False
    runs = []
    for mark, group in groupby(zip(tokens.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        ids = [token for token, _ in group]
        # some tokenizers would drop spaces in front of punctuation, which the trained text has
        runs.append((task.tokenizer.decode(ids, clean_up_tokenization_spaces=False), mark, len(ids)))
    return ShownSample(runs, lost, label, role)


def _counts(rows: Rows, tokenizer: PreTrainedTokenizerFast, lengths: np.ndarray) -> dict[str, str]:
    num_tokens, num_documents = len(rows.stream.tokens), len(lengths)
    places = len(rows) * rows.sequence_length
    counts = {
        "rows": f"{len(rows):,} of {rows.sequence_length} tokens",
        "documents": f"{num_documents:,}",
        "tokens": f"{num_tokens:,}",
    }
    if not isinstance(rows, LabelledRows):
        counts["trained tokens"] = _share(rows.num_targets, num_tokens)
    if isinstance(rows, (SampleRows, TextRows)):
        counts["padding"] = _share(places - int(rows.sizes.sum()), places)
    if isinstance(rows, SampleRows):
        counts |= {
            "truncated documents": f"{_share(rows.num_truncated, num_documents)}, {rows.num_truncated_tokens:,} tokens",
            "dropped documents": f"{_share(rows.num_dropped, num_documents)}: {_why_dropped(rows, 'train')}",
        }
    offsets = np.asarray(rows.stream.offsets)
    seen = {hash(rows.stream.tokens[a:b].tobytes()) for a, b in zip(offsets[:-1], offsets[1:], strict=True)}
    counts["exact duplicates"] = _share(num_documents - len(seen), num_documents)
    if tokenizer.unk_token_id is None:
        counts["unknown tokens"] = "none: the tokenizer has a token for every byte or character"
    else:
        num_unknown = int((rows.stream.tokens[:] == tokenizer.unk_token_id).sum())
        counts["unknown tokens"] = _share(num_unknown, num_tokens)
    return counts


def _why_dropped(rows: TruncatedRows, verb: str) -> str:
    return f"{'too long, or ' if rows.truncation == 'drop' else ''}nothing is left to {verb}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / max(whole, 1):.1%})"


def _ends(rows: Rows, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Count documents by the text of their last trained token; those whose last one is truncated count under ""."""
    if isinstance(rows, TextRows):
        return {}
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for index in range(_num_documents(rows)):
        tokens, trained = _document(rows, index)
        places = np.flatnonzero(trained)
        span = _kept(rows, len(tokens)) if isinstance(rows, SampleRows) else slice(0, len(tokens))
        if not len(places) or not span.start < places[-1] < span.stop:
            counts[""] += 1
            continue
        token = int(tokens[places[-1]])
        if token not in names:
            (names[token],) = tokenizer.batch_decode([[token]])
        counts[names[token]] += 1
    return dict(counts.most_common())


def summary(sample: ShownSample) -> str:
    trained = sum(count for _, mark, count in sample.runs if mark)
    total = sum(count for _, _, count in sample.runs)
    lost = f", {sample.lost} more cut off" if sample.lost else ""
    role = f"{sample.role}: " if sample.role else ""
    if sample.label:
        return f"{role}{total} tokens, label {sample.label}{lost}"
    return f"{role}{total} tokens{f', {trained} trained' if trained or not role else ''}{lost}"


def marked(sample: ShownSample, colours: bool) -> Text:
    """Mark trained text by colour, or by ⟦ and ⟧ if colours are not available."""
    text = Text()
    for piece, trained, _ in sample.runs:
        if trained and not colours:
            piece = f"⟦{piece}⟧"
        text.append(piece, style=TRAINED if trained and colours else None)
    return text


def _lines(name: str, rows: Rows, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield the lines about one part of the data: counts, ends of texts, a histogram of lengths, and the first rows."""
    shown = _texts(rows)
    lengths = np.diff(shown.stream.offsets)
    counts = _counts(shown, tokenizer, lengths)
    if isinstance(rows, PairRows):
        dropped = f"{_share(rows.num_dropped, _num_documents(rows))}: {_why_dropped(rows, 'compare')}"
        counts = {"pairs": f"{len(rows):,}", "dropped pairs": dropped, **counts}
    yield name
    for label, value in counts.items():
        yield f"  {label:<{LABEL_WIDTH}}{value}"
    by_end = _ends(shown, tokenizer)
    ends = [f"{text!r} {count:,}" for text, count in by_end.items() if text][:5]
    ends += [f"cut off {by_end['']:,}"] if "" in by_end else []
    if ends:
        yield f"  {'last trained token':<{LABEL_WIDTH}}{', '.join(ends)}"
    yield "  tokens per document"
    bins, limit = [], shown.limit if isinstance(shown, SampleRows) else lengths.max(initial=0)
    if len(lengths):  # bins that double in width
        edges = 1 << np.arange(int(lengths.min()).bit_length() - 1, int(lengths.max()).bit_length() + 1)
        bins = [(low, high, lengths[(lengths >= low) & (lengths < high)]) for low, high in pairwise(edges.tolist())]
    most = max((len(inside) for *_, inside in bins), default=1)
    for low, high, inside in bins:
        too_long = int((inside > limit).sum())
        bar, note = "█" * round(40 * len(inside) / max(most, 1)), f" ({too_long:,} too long)" if too_long else ""
        yield f"  {f'{low:,}-{high - 1:,}':>{LABEL_WIDTH - 2}}  {bar} {len(inside):,}{note}"
    num_rows = min(SHOWN_ROWS, len(shown))
    yield f"  the first {num_rows} rows, {rows.sequence_length} tokens wide"
    for index in range(num_rows):
        # the tokens of each document in the row, without padding
        if isinstance(shown, PackedSampleRows):
            members = shown.sizes[shown.members[shown.row_offsets[index] : shown.row_offsets[index + 1]]].tolist()
        elif isinstance(shown, PackedRows):  # a document starts where positions restart at 0
            positions = shown[np.array([index])].inputs["position_ids"][0]
            members = np.diff([*np.flatnonzero(positions == 0).tolist(), len(positions)]).tolist()
        else:
            assert isinstance(shown, (SampleRows, TextRows))
            members = [int(shown.sizes[index])]
        number = f"{len(members)} document{'s' * (len(members) > 1)}"
        yield f"  {index:>{LABEL_WIDTH - 2}}  {bar_of(members, rows.sequence_length)} {number}"


def bar_of(sizes: list[int], sequence_length: int) -> str:
    """Draw a row as a bar of BAR_WIDTH characters, with padding as dots."""
    bar, place = "", 0
    for index, size in enumerate(sizes):
        place += size
        # counted from the start of the row, so that rounding errors do not add up
        bar += BLOCKS[index % 2] * (round(place * BAR_WIDTH / sequence_length) - len(bar))
    return bar.ljust(BAR_WIDTH, "·")
