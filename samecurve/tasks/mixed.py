"""The data sets of `data.mixture`, each read, cached and checked by itself, as the rows of one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .. import corpus, sources
from ..cache import location
from ..config import Data, Recipe
from ..errors import DataError
from ..mixture import JoinedRows, MixedRows
from ..rows import Rows
from . import parts


@dataclass(frozen=True)
class WholeSource(sources.Source):
    """All sources one after the other: what a tokenizer is trained on, whatever the weights."""

    members: tuple[sources.Source, ...] = ()

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


def find(recipe: Recipe, find_one: Callable[[Data], sources.Source]) -> sources.Source:
    """All training documents. Errors: DataError, of all sources together."""
    found = _together(lambda data=data: find_one(data) for data in recipe.data.sources())
    if len(found) == 1:
        return found[0]
    files = tuple(file for source in found for file in source.files)
    return WholeSource(recipe.data.name, files, members=tuple(found))


def load(
    recipe: Recipe,
    encoder: corpus.Encoder,
    find_one: Callable[[Data], sources.Source],
    make_rows: Callable[[corpus.TokenStream], Rows],
) -> parts.Parts:
    """find_one: what `data` says of one source to that source. Errors: as parts.load, of all sources together."""
    fraction, cache = sources.held_out_fraction(recipe), location(recipe.data.cache_dir)

    def read(data: Data, held_out_fraction: float = fraction) -> corpus.Corpus:
        return corpus.load(find_one(data), encoder, held_out_fraction, cache)

    found = _together(lambda data=data: read(data) for data in recipe.data.sources())
    train = MixedRows([make_rows(one.train) for one in found], [source.weight for source in recipe.data.mixture])
    _check(train, recipe)
    held_out = None
    if recipe.evaluate.path is not None:
        held_out = make_rows(read(recipe.data.read_from(recipe.evaluate.path), 0.0).train)
    elif fraction > 0:
        held_out = JoinedRows([make_rows(one.held_out) for one in found])
    counts = parts.added(one.counts for one in found)
    loaded = parts.Parts(train, held_out, sum(one.empty_documents for one in found), counts)
    parts.check_held_out(loaded, recipe)
    return loaded


def describe(recipe: Recipe, loaded: parts.Parts) -> dict[str, dict[str, object]]:
    """For the header and run.json, by source. epochs: how often a run of `steps` reads each of its rows."""
    num_rows = recipe.steps * recipe.batch.global_batch_size
    found = {}
    for index, (source, rows, share) in enumerate(
        zip(recipe.data.mixture, loaded.train.parts, loaded.train.shares, strict=True)
    ):
        found[f"source {index}"] = {
            "path": source.path,
            "weight": share,
            **parts.describe_rows(rows),
            "epochs": num_rows * share / len(rows),
        }
    return found


def _check(train: MixedRows, recipe: Recipe) -> None:
    """No row may be twice in one step."""
    batch, problems, known = recipe.batch, [], {}
    for index, (source, rows) in enumerate(zip(recipe.data.mixture, train.parts, strict=True)):
        num_wanted = math.ceil(batch.global_batch_size * train.shares[index])
        if len(rows) < num_wanted:
            fix = parts.lost(rows) or "; give more data, or lower its weight or batch.global_batch_size"
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
    """All results. Raises DataError that tells what is wrong with all sources together."""
    results, problems = [], []
    for call in calls:
        try:
            results.append(call())
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return results
