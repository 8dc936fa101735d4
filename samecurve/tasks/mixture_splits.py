"""Loads the data sets of `data.mixture`. Each is read, cached and checked separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from samecurve.config.schema import Data, Recipe
from samecurve.data import sources, token_store
from samecurve.data.columns import Columns
from samecurve.data.datasets.base import Rows
from samecurve.data.datasets.mixture import JoinedRows, MixedRows
from samecurve.data.datasets.streaming import StreamRows
from samecurve.data.encoder import Encoder
from samecurve.errors import DataError
from samecurve.storage.cache import cache_folder
from samecurve.tasks import splits

T = TypeVar("T")


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


def load_mixture(
    recipe: Recipe,
    encoder: Encoder,
    find_source: Callable[[Data], sources.DataSource],
    make_rows: Callable[[token_store.TokenStream], Rows],
) -> splits.Splits[Rows]:
    """Load the mixed training rows and the joined validation rows.

    Args:
        recipe: a recipe with data.mixture.
        find_source: returns the source of one `data` block.
        make_rows: cuts a token stream into rows.

    Raises:
        DataError: as `splits.load_splits`, with the problems of all sources together.
    """
    fraction, cache = sources.validation_fraction(recipe), cache_folder(recipe.data.cache_dir)
    origins: dict[str, list[str]] = {}

    def read(data: Data, validation_fraction: float = fraction, name: str = splits.ORIGIN) -> token_store.Corpus:
        source = find_source(data)
        if source.origin:
            origins.setdefault(name, []).append(source.origin)
        return token_store.load_corpus(source, encoder, validation_fraction, cache)

    corpora = call_all(partial(read, data) for data in recipe.data.sources())
    if fraction > 0 and all(len(corpus.held_out.offsets) == 1 for corpus in corpora):
        fraction = sources.fraction_of_one(find_all_sources(recipe, find_source), fraction)
        origins.clear()
        corpora = [read(data, fraction) for data in recipe.data.sources()]
    weights = [source.weight for source in recipe.data.mixture or ()]
    train = MixedRows([make_rows(corpus.train) for corpus in corpora], weights)
    _check_sources(train, corpora, recipe)
    validation, evaluated = None, None
    if recipe.evaluation is not None:
        evaluated = read(recipe.evaluation, 0.0, splits.EVALUATED)
        validation = make_rows(evaluated.train)
    elif fraction > 0:
        validation = JoinedRows([make_rows(corpus.held_out) for corpus in corpora])
    counts = splits.add_counts(corpus.counts for corpus in corpora)
    joined_origins = {name: "; ".join(parts) for name, parts in origins.items()}
    num_empty = sum(corpus.empty_documents for corpus in corpora)
    described, bad_rows = splits.describe_reading(corpora, evaluated)
    counted = {**counts, **encoder.facts, **described, **joined_origins}
    loaded = splits.Splits(train, validation, num_empty, counted, bad_rows)
    splits.refuse_long_documents(recipe, loaded, encoder, find_source, fraction)
    splits.check_validation(loaded, recipe)
    return loaded


def describe_sources(recipe: Recipe, loaded: splits.Splits[Rows]) -> dict[str, object]:
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
            **splits.describe_rows(rows),
            **({} if isinstance(rows, StreamRows) else {"epochs": num_rows * share / len(rows)}),
        }
        for index, (source, rows, share) in enumerate(sources_of_rows)
    }


def _check_sources(train: MixedRows, corpora: list[token_store.Corpus], recipe: Recipe) -> None:
    """Raise DataError if a step would read a row twice: too few rows of a source, or the same data in two sources."""
    batch, problems = recipe.batch, []
    for index, (source, rows) in enumerate(zip(recipe.data.mixture or (), train.parts, strict=True)):
        num_wanted = train.most_in_step(index, batch.global_batch_size)
        if len(rows) < num_wanted:
            fraction = sources.validation_fraction(recipe)
            usual = "; give more data, or lower its weight or batch.global_batch_size"
            fix = splits.explain_lost_documents(rows, corpora[index], fraction) or usual
            problems.append(
                f"data.mixture.{index}: {source.path}: {len(rows)} training rows of batch.sequence_length="
                f"{batch.sequence_length} are fewer than the {num_wanted} that its weight takes of a global batch of "
                f"{batch.global_batch_size}{fix}"
            )
    check_distinct(recipe, train, problems)


def check_distinct(recipe: Recipe, train: Rows, others: Sequence[str] = ()) -> None:
    """Raise one DataError with `others` and for two sources of a mixture that have the same data."""
    problems, known = [*others], {}
    for index, (source, rows) in enumerate(zip(recipe.data.mixture or (), train.parts, strict=True)):
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
