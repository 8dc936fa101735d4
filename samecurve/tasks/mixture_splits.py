"""Loads the data sets of `data.mixture`. Each is read, cached and checked separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from samecurve.config.schema import Data, Recipe
from samecurve.data import sources, token_store
from samecurve.data.datasets.base import Rows
from samecurve.data.datasets.mixture import JoinedRows, MixedRows
from samecurve.data.encoder import Encoder
from samecurve.errors import DataError
from samecurve.storage.cache import cache_folder
from samecurve.tasks import splits


@dataclass(frozen=True)
class WholeSource(sources.DataSource):
    """Concatenation of all sources, on which a tokenizer is trained regardless of the mixture's weights."""

    members: tuple[sources.DataSource, ...] = ()

    @property
    def identity(self) -> str:
        return repr([member.identity for member in self.members])

    def check(self) -> None:
        _together(member.check for member in self.members)

    def texts(self, document) -> list[str]:
        return self.members[0].texts(document)

    def documents(self) -> Iterator:
        for member in self.members:
            yield from member.documents()


def find(recipe: Recipe, find_one: Callable[[Data], sources.DataSource]) -> sources.DataSource:
    """Return one source of all training documents. Raises one DataError that lists the problems of all sources."""
    found = _together(lambda data=data: find_one(data) for data in recipe.data.sources())
    if len(found) == 1:
        return found[0]
    files = tuple(file for source in found for file in source.files)
    return WholeSource(recipe.data.name, files, members=tuple(found))


def load(
    recipe: Recipe,
    encoder: Encoder,
    find_one: Callable[[Data], sources.DataSource],
    make_rows: Callable[[token_store.TokenStream], Rows],
) -> splits.Parts:
    """Load the mixed training rows and the joined held-out rows.

    Args:
        recipe: a recipe with data.mixture.
        encoder: turns a document into token ids.
        find_one: returns the source of one `data` block.
        make_rows: cuts a token stream into rows.

    Raises:
        DataError: as `splits.load`, with the problems of all sources together.
    """
    fraction, cache = sources.validation_fraction(recipe), cache_folder(recipe.data.cache_dir)

    origins: dict[str, list[str]] = {}

    def read(data: Data, validation_fraction: float = fraction, name: str = splits.ORIGIN) -> token_store.Corpus:
        source = find_one(data)
        if source.origin:
            origins.setdefault(name, []).append(source.origin)
        return token_store.load_corpus(source, encoder, validation_fraction, cache)

    found = _together(lambda data=data: read(data) for data in recipe.data.sources())
    train = MixedRows([make_rows(one.train) for one in found], [source.weight for source in recipe.data.mixture])
    _check(train, found, recipe)
    held_out = None
    if recipe.evaluation is not None:
        held_out = make_rows(read(recipe.evaluation, 0.0, splits.EVALUATED).train)
    elif fraction > 0:
        held_out = JoinedRows([make_rows(one.held_out) for one in found])
    counts = splits.added(one.counts for one in found) | {name: "; ".join(each) for name, each in origins.items()}
    loaded = splits.Parts(train, held_out, sum(one.empty_documents for one in found), counts)
    splits.check_held_out(loaded, recipe)
    return loaded


def describe(recipe: Recipe, loaded: splits.Parts) -> dict[str, dict[str, object]]:
    """Describe each source for the header and run.json.

    `epochs` is how often a run of recipe.steps steps reads each row of the source.
    """
    num_rows = recipe.steps * recipe.batch.global_batch_size
    found = {}
    for index, (source, rows, share) in enumerate(
        zip(recipe.data.mixture, loaded.train.parts, loaded.train.shares, strict=True)
    ):
        found[f"source {index}"] = {
            "path": source.path,
            "weight": share,
            **splits.describe_rows(rows),
            "epochs": num_rows * share / len(rows),
        }
    return found


def _check(train: MixedRows, found: list[token_store.Corpus], recipe: Recipe) -> None:
    """Raise DataError if a step would read a row twice: too few rows of a source, or the same data in two sources."""
    batch, problems, known = recipe.batch, [], {}
    for index, (source, rows) in enumerate(zip(recipe.data.mixture, train.parts, strict=True)):
        num_wanted = train.most_in_step(index, batch.global_batch_size)
        if len(rows) < num_wanted:
            fraction = sources.validation_fraction(recipe)
            usual = "; give more data, or lower its weight or batch.global_batch_size"
            fix = splits.lost(rows, found[index], fraction) or usual
            problems.append(
                f"data.mixture.{index}: {source.path}: {len(rows)} training rows of batch.sequence_length="
                f"{batch.sequence_length} are fewer than the {num_wanted} that its weight takes of a global batch of "
                f"{batch.global_batch_size}{fix}"
            )
        first = known.setdefault(rows.fingerprint, index)
        if first != index:
            problems.append(
                f"data.mixture.{index}: {source.path} holds what data.mixture.{first} holds; keep one of them, with "
                "the sum of their weights"
            )
    if problems:
        raise DataError("\n".join(problems))


def _together(calls: Iterable[Callable]) -> list:
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
