"""What every task does with its data: read the training and the held-out part, check them, say what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import corpus, sources, tokenizer
from ..cache import location
from ..config import Recipe
from ..errors import DataError
from ..pair_rows import PairRows
from ..rows import LengthGroups, Rows, SampleRows
from ..stream_rows import StreamRows
from . import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Parts:
    """held_out: None when the recipe holds nothing out. counts: what the encoder counted."""

    train: Rows
    held_out: Rows | None
    empty_documents: int
    counts: dict[str, int]

    def describe(self) -> dict[str, dict[str, int]]:
        parts = {"train": self.train, "held_out": self.held_out}
        return {name: describe_rows(rows) for name, rows in parts.items() if rows is not None}


@dataclass
class TextTask(Task):
    """What every task is made of that reads no stream of tokens."""

    tokenizer: PreTrainedTokenizerFast
    parts: Parts

    @property
    def train(self) -> Rows:
        return self.parts.train

    @property
    def held_out(self) -> Rows | None:
        return self.parts.held_out

    @property
    def vocabulary_size(self) -> int:
        return corpus.vocabulary_size(self.tokenizer)

    @property
    def special_tokens(self) -> dict[str, int]:
        return tokenizer.special_ids(self.tokenizer)


def load(
    recipe: Recipe,
    encoder: corpus.Encoder,
    find: Callable[[str], sources.Source],
    make_rows: Callable[[corpus.TokenStream], Rows],
) -> Parts:
    """find: a path of the recipe to its source.

    Errors: DataError for unusable data, for fewer rows than one global batch, for an empty held-out part.
    """

    def read(path: str, held_out_fraction: float) -> corpus.Corpus:
        return corpus.load(find(path), encoder, held_out_fraction, location(recipe.data.cache_dir))

    fraction = sources.held_out_fraction(recipe)
    training = read(recipe.data.path, fraction)
    held_out = None
    if recipe.evaluate.path is not None:
        held_out = make_rows(read(recipe.evaluate.path, 0.0).train)
    elif fraction > 0:
        held_out = make_rows(training.held_out)
    parts = Parts(make_rows(training.train), held_out, training.empty_documents, training.counts)
    _check(parts, recipe)
    return parts


def padded(
    recipe: Recipe, kinds: tuple[type[Rows], type[LengthGroups]], stream: corpus.TokenStream, *arguments: object
) -> Rows:
    """Rows that are padded. kinds: in any order, and with steps of nearly the same length (data.group_by_length).

    arguments: what else the rows take, the padding token first.
    """
    plain, grouped = kinds
    given = (stream, recipe.batch.sequence_length, *arguments)
    if recipe.data.group_by_length:
        return grouped(*given, global_batch_size=recipe.batch.global_batch_size)
    return plain(*given)


def _check(parts: Parts, recipe: Recipe) -> None:
    num_rows, num_wanted = len(parts.train), recipe.batch.global_batch_size
    if num_rows < num_wanted:
        fix = lost(parts.train) or "; give more data, or lower one of the two"
        raise DataError(
            f"{recipe.data.path}: {num_rows} training rows of batch.sequence_length={recipe.batch.sequence_length} are "
            f"fewer than batch.global_batch_size={num_wanted}{fix}"
        )
    check_held_out(parts, recipe)


def lost(rows: Rows) -> str:
    """For a message about too few rows, how many documents became none and what to do; empty where none was lost."""
    counts = _describe(rows)
    if not counts.get("dropped_documents"):
        return ""
    return (
        f" ({counts['dropped_documents']} of {counts['documents']} documents dropped: nothing trained is left of them "
        f"within batch.sequence_length={rows.sequence_length}); raise it, or give more data, or lower "
        "batch.global_batch_size"
    )


def check_held_out(parts: Parts, recipe: Recipe) -> None:
    """Raises DataError where something is held out, but no row."""
    if parts.held_out is not None and not len(parts.held_out):
        num_documents = describe_rows(parts.train)["documents"]
        raise DataError(
            f"{recipe.evaluate.path or recipe.data.name}: no document is held out (data.held_out_fraction="
            f"{recipe.data.held_out_fraction:g} of {num_documents} documents, each kept whole); raise the fraction, or "
            "set evaluate.path to a file of its own, or hold nothing out "
            "(data.held_out_fraction=0 evaluate.every_steps=0)"
        )


def describe_rows(rows: Rows) -> dict[str, int]:
    """Of a mixture: the sums over its sources."""
    return added(_describe(part) for part in rows.parts)


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counts of the same names, one by one."""
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
