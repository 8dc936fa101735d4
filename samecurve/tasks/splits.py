"""Training and held-out rows of a task: loading, checking, describing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samecurve.config.schema import Data, Recipe
from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.base import LengthGroups, Rows, SampleRows
from samecurve.data.datasets.preference import PairRows
from samecurve.data.datasets.streaming import StreamRows
from samecurve.data.encoder import Encoder, vocabulary_size
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.storage.cache import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Keys of Parts.counts that name the origin of the training and of the evaluation data.
ORIGIN, EVALUATED = "hub", "evaluated_on"


@dataclass(frozen=True)
class Parts:
    """Training and held-out rows of a task.

    Attributes:
        train: training rows.
        held_out: held-out rows; None when the recipe holds nothing out.
        empty_documents: number of documents that were dropped because they hold no token.
        counts: the encoder's counts by name; for data of the hub also the origin (split and commit).
    """

    train: Rows
    held_out: Rows | None
    empty_documents: int
    counts: dict[str, int | str]

    def describe(self) -> dict[str, dict[str, int]]:
        parts = {"train": self.train, "held_out": self.held_out}
        return {name: describe_rows(rows) for name, rows in parts.items() if rows is not None}


@dataclass
class TextTask(Task):
    """Base of the tasks that train on separate texts, not on a causal language model's token stream."""

    tokenizer: PreTrainedTokenizerFast
    parts: Parts

    @property
    def train(self) -> Rows:
        return self.parts.train

    @property
    def held_out(self) -> Rows | None:
        return self.parts.held_out

    @property
    def origin(self) -> str:
        return self.parts.counts.get(ORIGIN, "")

    @property
    def vocabulary_size(self) -> int:
        return vocabulary_size(self.tokenizer)

    @property
    def special_tokens(self) -> dict[str, int]:
        return tokenizer.special_ids(self.tokenizer)


def load(
    recipe: Recipe,
    encoder: Encoder,
    find: Callable[[Data], sources.DataSource],
    make_rows: Callable[[token_store.TokenStream], Rows],
) -> Parts:
    """Load the training and the held-out rows of one data set.

    Args:
        recipe: the whole recipe.
        encoder: turns a document into token ids.
        find: returns the source of one `data` block.
        make_rows: cuts a token stream into rows.

    Raises:
        DataError: for unusable data, for fewer rows than one global batch, for an empty held-out part.
    """

    origins: dict[str, str] = {}

    def read(data: Data, validation_fraction: float, name: str) -> token_store.Corpus:
        source = find(data)
        origins.update({name: source.origin} if source.origin else {})
        return token_store.load_corpus(source, encoder, validation_fraction, cache_folder(recipe.data.cache_dir))

    fraction = sources.validation_fraction(recipe)
    training = read(recipe.data, fraction, ORIGIN)
    held_out = None
    if recipe.evaluation is not None:
        held_out = make_rows(read(recipe.evaluation, 0.0, EVALUATED).train)
    elif fraction > 0:
        held_out = make_rows(training.held_out)
    parts = Parts(make_rows(training.train), held_out, training.empty_documents, training.counts | origins)
    if len(parts.train) < recipe.batch.global_batch_size:
        raise _too_few(parts.train, training, recipe)
    check_held_out(parts, recipe)
    return parts


def padded(
    recipe: Recipe, kinds: tuple[type[Rows], type[LengthGroups]], stream: token_store.TokenStream, *arguments: object
) -> Rows:
    """Return padded rows, grouped by length if the recipe sets data.group_by_length.

    Args:
        recipe: the whole recipe.
        kinds: (class of plain rows, class of rows grouped by length).
        stream: tokens of all documents.
        arguments: further arguments of both classes, the padding token first.
    """
    plain, grouped = kinds
    given = (stream, recipe.batch.sequence_length, *arguments)
    if recipe.data.group_by_length:
        return grouped(*given, global_batch_size=recipe.batch.global_batch_size)
    return plain(*given)


def _too_few(rows: Rows, training: token_store.Corpus, recipe: Recipe) -> DataError:
    wanted, length = recipe.batch.global_batch_size, recipe.batch.sequence_length
    fix = lost(rows, training, sources.validation_fraction(recipe)) or "; give more data, or lower one of the two"
    return DataError(
        f"{recipe.data.path}: {len(rows)} training rows of batch.sequence_length={length} are fewer than "
        f"batch.global_batch_size={wanted}{fix}"
    )


def lost(rows: Rows, training: token_store.Corpus, validation_fraction: float) -> str:
    """Explain too few rows, for a message: how many documents are missing, why, and what to do; "" if none is."""
    counts, num_held_out = _describe(rows), len(training.held_out.offsets) - 1
    total = counts["documents"] + training.empty_documents + num_held_out
    reasons, fixes = [], []
    if counts.get("dropped_documents"):
        reasons.append(
            f"{counts['dropped_documents']} of {total} documents dropped: nothing trained is left of them within "
            f"batch.sequence_length={rows.sequence_length}"
        )
        fixes.append("raise it")
    if num_held_out:
        reasons.append(
            f"{num_held_out} of {total} documents held out by data.validation_fraction={validation_fraction:g}"
        )
        fixes.append("lower that fraction")
    if training.empty_documents:
        reasons.append(f"{training.empty_documents} of {total} documents are empty")
    if not reasons:
        return ""
    fixes += ["give more data", "lower batch.global_batch_size"]
    return f" ({'; '.join(reasons)}); {', or '.join(fixes)}"


def check_held_out(parts: Parts, recipe: Recipe) -> None:
    """Raise DataError if a part is held out but has no row."""
    if parts.held_out is None or len(parts.held_out):
        return
    if recipe.evaluation is not None:
        raise DataError(
            f"{recipe.evaluation.path}: holds no row to evaluate on: all its documents are empty, or nothing of them "
            f"is left within batch.sequence_length={recipe.batch.sequence_length}; correct evaluate.path"
        )
    num_documents = describe_rows(parts.train)["documents"]
    raise DataError(
        f"{recipe.data.name}: no document is held out (data.validation_fraction={recipe.data.validation_fraction:g} of "
        f"{num_documents} documents, each kept whole); raise the fraction, or set evaluate.path to a file of its own, "
        "or hold nothing out (data.validation_fraction=0 evaluate.every_steps=0)"
    )


def describe_rows(rows: Rows) -> dict[str, int]:
    """Return counts of rows, documents and tokens by name; for a mixture summed over its sources."""
    return added(_describe(part) for part in rows.parts)


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up counts name by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def _describe(rows: Rows) -> dict[str, int]:
    if isinstance(rows, StreamRows):
        return rows.facts
    counts = {"rows": len(rows), "documents": len(rows.stream.offsets) - 1, "tokens": len(rows.stream.tokens)}
    if rows.targets_are_tokens:
        counts["trained_tokens"] = rows.num_targets
    if isinstance(rows, (SampleRows, PairRows)):
        counts |= {
            "dropped_documents": rows.num_dropped,
            "truncated_documents": rows.num_truncated,
            "truncated_tokens": rows.num_truncated_tokens,
        }
    return counts
