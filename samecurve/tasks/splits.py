"""Training and validation rows of a task: loading, checking, describing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from samecurve.config.schema import Data, Recipe
from samecurve.data import sources, token_store, tokenizer
from samecurve.data.columns import Columns
from samecurve.data.datasets.base import Rows, TruncatedRows, grouped
from samecurve.data.datasets.mixture import JoinedRows, MixedRows
from samecurve.data.datasets.streaming import StreamRows
from samecurve.data.encoder import Encoder, vocabulary_size
from samecurve.data.row_checks import first_bad_rows
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.storage.cache import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


T = TypeVar("T")
RowsType = TypeVar("RowsType", bound=Rows, covariant=True)
# Keys of Splits.counts that name the origin of the training and of the evaluation data.
ORIGIN, EVALUATED = "hub", "evaluated_on"


@dataclass(frozen=True)
class Splits(Generic[RowsType]):
    """Training and validation rows of a task.

    Attributes:
        train: training rows.
        validation: validation rows; None if the recipe has none.
        empty_documents: number of documents that were dropped because they hold no token.
        counts: the encoder's counts and facts by name; the columns that are read; the number of bad rows that were
            dropped, if any; for data of the hub also the origin (split and commit).
        bad_rows: files with the dropped rows.
    """

    train: RowsType
    validation: RowsType | None
    empty_documents: int
    counts: Mapping[str, int | str]
    bad_rows: tuple[Path, ...] = ()

    def describe(self) -> dict[str, dict[str, int]]:
        # The keys are those of run.json, which reports read.
        splits = {"train": self.train, "held_out": self.validation}
        return {name: describe_rows(rows) for name, rows in splits.items() if rows is not None}


@dataclass
class LoadedTask(Task, Generic[RowsType]):
    """Base of the tasks: the tokenizer and the rows."""

    tokenizer: PreTrainedTokenizerFast
    splits: Splits[RowsType]

    @property
    def train(self) -> RowsType:
        return self.splits.train

    @property
    def validation(self) -> RowsType | None:
        return self.splits.validation

    @property
    def eval_rows(self) -> RowsType:
        """The validation rows, for `metrics`, which is called only where there are some."""
        assert self.splits.validation is not None
        return self.splits.validation

    @property
    def bad_rows(self) -> tuple[Path, ...]:
        return self.splits.bad_rows

    @property
    def origin(self) -> str:
        return str(self.splits.counts.get(ORIGIN, ""))

    @property
    def vocabulary_size(self) -> int:
        return vocabulary_size(self.tokenizer)

    @property
    def special_tokens(self) -> dict[str, int]:
        return tokenizer.special_ids(self.tokenizer)

    def describe(self) -> dict[str, object]:
        counted = {"vocabulary_size": self.vocabulary_size, "empty_documents": self.splits.empty_documents}
        return {**self.splits.describe(), **counted, **self.splits.counts}


def load_splits(
    recipe: Recipe,
    encoder: Encoder,
    find_source: Callable[[Data], sources.DataSource],
    make_rows: Callable[[token_store.TokenStream], RowsType],
) -> Splits[RowsType]:
    """Load the training and the validation rows of one data set, or of a mixture's, each read and cached separately.

    `find_source` returns the source of one `data` block, and `make_rows` cuts a token stream into rows.

    Raises DataError for unusable data of any source, for fewer rows than a step reads, and for no rows to evaluate on.
    """
    cache, origins = cache_folder(recipe.data.cache_dir), defaultdict(list)

    def read(data: Data, validation_fraction: float, name: str = ORIGIN) -> token_store.Corpus:
        source = find_source(data)
        if source.origin:
            origins[name].append(source.origin)
        return token_store.load_corpus(source, encoder, validation_fraction, cache)

    mixture, fraction = recipe.data.mixture, sources.validation_fraction(recipe)
    corpora = call_all(partial(read, data, fraction) for data in recipe.data.sources())
    if fraction > 0 and all(len(corpus.held_out.offsets) == 1 for corpus in corpora):
        fraction = sources.fraction_of_one(find_all_sources(recipe, find_source), fraction)
        origins.clear()
        corpora = [read(data, fraction) for data in recipe.data.sources()]
    trained = [make_rows(corpus.train) for corpus in corpora]
    train: Any = trained[0] if mixture is None else MixedRows(trained, [source.weight for source in mixture])
    validation: Any = None
    evaluated = None
    if recipe.evaluation is not None:
        evaluated = read(recipe.evaluation, 0.0, EVALUATED)
        validation = make_rows(evaluated.train)
    elif fraction > 0:
        held_out = [make_rows(corpus.held_out) for corpus in corpora]
        validation = held_out[0] if mixture is None else JoinedRows(held_out)
    described, bad_rows = describe_reading(corpora, evaluated)
    counts = {**add_counts(corpus.counts for corpus in corpora), **encoder.facts, **described}
    counts |= {name: "; ".join(parts) for name, parts in origins.items()}
    num_empty = sum(corpus.empty_documents for corpus in corpora)
    splits = Splits(train, validation, num_empty, counts, bad_rows)
    refuse_long_documents(recipe, splits, encoder, find_source, fraction)
    _refuse_few_rows(recipe, train, corpora, fraction)
    check_validation(splits, recipe)
    return splits


def _refuse_few_rows(
    recipe: Recipe, train: Rows, corpora: Sequence[token_store.Corpus], validation_fraction: float
) -> None:
    """Raise DataError if a step would read a row twice: too few rows of a source, or the same data in two sources."""
    size, length, problems = recipe.batch.global_batch_size, recipe.batch.sequence_length, []
    for index, (rows, corpus) in enumerate(zip(train.parts, corpora, strict=True)):
        num_wanted = train.most_in_step(index, size) if isinstance(train, MixedRows) else size
        if len(rows) >= num_wanted:
            continue
        fix = explain_lost_documents(rows, corpus, validation_fraction)
        few = f"{len(rows)} training rows of batch.sequence_length={length} are fewer than"
        if (documents := _counts_of(rows)["documents"]) >= num_wanted and recipe.data.packing:
            fix = f", into which {documents} documents are packed; data.packing=false makes a row of each{fix}"
        if isinstance(train, MixedRows):
            problems.append(
                f"data.mixture.{index}: {recipe.data.sources()[index].path}: {few} the {num_wanted} that its "
                f"weight takes of a global batch of {size}"
                f"{fix or '; give more data, or lower its weight or batch.global_batch_size'}"
            )
            continue
        problems.append(
            f"{recipe.data.path}: {few} batch.global_batch_size={size}"
            f"{fix or '; give more data, or lower one of the two'}"
        )
        if quarter := 2 ** round(math.log2(len(rows) / 4)) if len(rows) > 3 else 0:  # sizes that would do
            steps = round(len(rows) / quarter)
            problems[-1] += f"; batch.global_batch_size={quarter} would be about {steps} steps per epoch, and "
            problems[-1] += f"{len(rows)} would be 1"
        elif len(rows):
            problems[-1] += f"; batch.global_batch_size={len(rows)} would be 1 step per epoch"
    check_distinct(recipe, train, problems)


def describe_reading(
    training: Sequence[token_store.Corpus], evaluated: token_store.Corpus | None
) -> tuple[dict[str, int | str], tuple[Path, ...]]:
    """Return entries of `Splits.counts` about the columns and the bad rows, and the files with these rows."""
    columns = [corpus.columns.describe() for corpus in training]
    if len(columns) > 1:
        columns = [f"source {index} {text}" for index, text in enumerate(columns) if text]
    num_bad_rows = sum(corpus.num_bad_rows for corpus in training)
    counts: dict[str, int | str] = {"rows": "; ".join(columns), "bad_rows": num_bad_rows}
    if evaluated is not None:
        counts["evaluation_bad_rows"] = evaluated.num_bad_rows
    corpora = [*training, *([evaluated] if evaluated is not None else [])]
    counts["first_bad_rows"] = "; ".join(first_bad_rows([corpus.bad_rows for corpus in corpora]))
    return {name: value for name, value in counts.items() if value}, tuple(corpus.bad_rows for corpus in corpora)


def find_text(recipe: Recipe, data: Data) -> sources.DataSource:
    """Find the plain documents of one `data` block. Raises as `sources.find_source` does."""
    return sources.find_source(path_of(data), data.pattern, data.text_column, sources.Selection.of(recipe, data))


def path_of(data: Data) -> str:
    """Return the path of one `data` block."""
    assert data.path is not None  # it is null only where data.mixture is given, and its sources have one each
    return data.path


def token_id(text_tokenizer: PreTrainedTokenizerFast, name: Literal["eos", "pad", "mask"]) -> int:
    """Return the id of a special token. The encoder, or the task, has checked that the tokenizer has it."""
    token = getattr(text_tokenizer, f"{name}_token_id")
    assert isinstance(token, int), name
    return token


def padded_rows(
    recipe: Recipe, kind: Callable[..., RowsType], stream: token_store.TokenStream, *arguments: object
) -> RowsType:
    """Return padded rows of a class, grouped by length if the recipe sets data.group_by_length.

    `arguments`: those of the class behind stream and length, the padding token first.
    """
    length, options = recipe.batch.sequence_length, {}
    if recipe.data.group_by_length:
        kind, options = grouped(kind), {"global_batch_size": recipe.batch.global_batch_size}
    return kind(stream, length, *arguments, **options)


def explain_lost_documents(rows: Rows, training: token_store.Corpus, validation_fraction: float) -> str:
    """Explain too few rows, for a message: how many documents are missing, why, and what to do; "" if none is."""
    counts, num_held_out = _counts_of(rows), len(training.held_out.offsets) - 1
    total = counts["documents"] + training.empty_documents + num_held_out
    reasons, fixes = [], []
    if counts.get("dropped_documents"):
        assert isinstance(rows, TruncatedRows)  # only they count what is dropped
        length = f"batch.sequence_length={rows.sequence_length}"
        is_whole = rows.truncation == "drop"
        why = f"longer than {length}, or not trained" if is_whole else f"no trained token of them is within {length}"
        reasons.append(f"{counts['dropped_documents']} of {total} documents dropped: {why}")
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


def refuse_long_documents(
    recipe: Recipe,
    loaded: Splits[Rows],
    encoder: Encoder,
    find_source: Callable[[Data], sources.DataSource],
    validation_fraction: float,
) -> None:
    """Raise one DataError that names the first document of each source that data.truncation=error does not allow."""
    training = [(data, "train", validation_fraction) for data in recipe.data.sources()]
    held_out = [(data, "held_out", validation_fraction) for data in recipe.data.sources()]
    measured = held_out if recipe.evaluation is None else [(recipe.evaluation, "train", 0.0)]
    problems = []
    for blocks, rows in ((training, loaded.train), (measured, loaded.validation)):
        parts = () if rows is None else zip(blocks, rows.parts, strict=True)
        for (data, part, fraction), own in parts:
            if not isinstance(own, TruncatedRows) or own.truncation != "error" or not len(own.too_long):
                continue
            place = token_store.place_of(find_source(data), encoder, part, fraction, int(own.too_long[0]))
            problems.append(
                f"{place}: longer than the {own.limit} tokens that batch.sequence_length={own.sequence_length} holds, "
                f"and the first of {len(own.too_long)} such of {len(own.stream.offsets) - 1} documents; raise "
                "batch.sequence_length, or set data.truncation to right, left or drop"
            )
    if problems:
        raise DataError("\n".join(problems))


def check_validation(splits: Splits, recipe: Recipe) -> None:
    """Raise DataError for a validation split without rows."""
    if splits.validation is None or len(splits.validation):
        return
    if recipe.evaluation is not None:
        raise DataError(
            f"{recipe.evaluation.path}: there are no rows to evaluate on: all documents are empty, or have no trained "
            f"token within batch.sequence_length={recipe.batch.sequence_length}; correct evaluate.path"
        )
    num_documents = describe_rows(splits.train)["documents"]
    raise DataError(
        f"{recipe.data.name}: no document is held out (data.validation_fraction={recipe.data.validation_fraction:g} of "
        f"{num_documents} documents, each kept whole); raise the fraction, or set evaluate.path to a separate file, "
        "or train without validation (data.validation_fraction=0 evaluate.every_steps=0)"
    )


def describe_rows(rows: Rows) -> dict[str, int]:
    """Return counts of rows, documents and tokens by name; for a mixture summed over its sources."""
    return add_counts(_counts_of(part) for part in rows.parts)


def add_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up counts name by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def _counts_of(rows: Rows) -> dict[str, int]:
    if isinstance(rows, StreamRows):
        return rows.facts  # its length is unknown
    counts = {"rows": len(rows), "documents": len(rows.stream.offsets) - 1, "tokens": len(rows.stream.tokens)}
    if rows.targets_are_tokens:
        counts["trained_tokens"] = rows.num_targets
    if isinstance(rows, TruncatedRows):
        counts |= {
            "dropped_documents": rows.num_dropped,
            "truncated_documents": rows.num_truncated,
            "truncated_tokens": rows.num_truncated_tokens,
        }
    return counts


def describe_sources(recipe: Recipe, loaded: Splits[Rows]) -> dict[str, object]:
    """Describe each source of a mixture for the header and run.json; {} without a mixture.

    `epochs` is how often a run of recipe.steps steps reads each row of the source, where their number is known.
    """
    if recipe.data.mixture is None:
        return {}
    num_rows = recipe.steps * recipe.batch.global_batch_size
    sources_of_rows = zip(recipe.data.mixture, loaded.train.parts, loaded.train.shares, strict=True)
    return {
        f"source {index}": {
            "path": source.path,
            "weight": share,
            **describe_rows(rows),
            **({} if isinstance(rows, StreamRows) else {"epochs": num_rows * share / len(rows)}),
        }
        for index, (source, rows, share) in enumerate(sources_of_rows)
    }


@dataclass(frozen=True)
class WholeSource(sources.DataSource):
    """Concatenation of all sources, on which a tokenizer is trained regardless of the mixture's weights."""

    members: tuple[sources.DataSource, ...] = ()

    @property
    def identity(self) -> str:
        return repr([member.identity for member in self.members])

    def check(self) -> Columns:
        call_all(member.check for member in self.members)
        return Columns()

    def texts(self, document) -> list[str]:
        return self.members[0].texts(document)  # all members hold the same kind of documents

    def documents(self) -> Iterator:
        return (document for member in self.members for document in member.documents())


def find_all_sources(recipe: Recipe, find_source: Callable[[Data], sources.DataSource]) -> sources.DataSource:
    """Return one source of all training documents. Raises one DataError that lists the problems of all sources."""
    members = call_all(partial(find_source, data) for data in recipe.data.sources())
    if len(members) == 1:
        return members[0]
    files = tuple(file for source in members for file in source.files)
    return WholeSource(recipe.data.name, files, members=tuple(members))


def check_distinct(recipe: Recipe, train: Rows, others: Sequence[str] = ()) -> None:
    """Raise one DataError with `others` and for two sources of a mixture that have the same data."""
    problems, known = [*others], {}
    for index, (source, rows) in enumerate(zip(recipe.data.sources(), train.parts, strict=True)):
        first = known.setdefault(rows.fingerprint, index)
        if first != index:
            problems.append(
                f"data.mixture.{index}: {source.path} has the same data as data.mixture.{first}; keep one of "
                "the two, with the sum of their weights"
            )
    if problems:
        raise DataError("\n".join(problems))


def call_all(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of all calls. Raises one DataError that lists the problems of all of them."""
    results, problems = [], []
    for call in calls:
        try:
            results.append(call())
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return results
