"""Several data sets as one: whose turn it is at each position, as a pure function of the position, and their rows."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np

from samecurve.data.datasets.base import RowArrays, Rows
from samecurve.data.sampler import Bounds
from samecurve.storage.cache import digest

Numbers = TypeVar("Numbers", np.ndarray, int)
_LARGEST_DENOMINATOR = 1 << 31  # the product of two of them fits into int64


class WeightedInterleaver:
    """Sources take turns in proportion to their weights, with no state: O(number of sources) at any position.

    The heaviest source has had round(share * n) of the first n turns; of what it left, the next one has its share of
    the weights that are left, and so on. So of any first n turns each source has had its share, up to
    (1 + 1 + 1/2 + ... + 1/(k - 1)) / 2 turns for k sources: less than 1 for two, less than 2 for ten. (The rounding
    of the j-th source before this one is passed on in the part weight / weights left, at most 1/j.)
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(weight)) for weight in weights]  # 0.7 as it is written, not as it is in binary
        self.shares = tuple(float(weight / sum(exact)) for weight in exact)
        self._cascade: list[tuple[int, Fraction]] = []
        rest = sum(exact)
        for source in sorted(range(len(exact)), key=lambda index: -exact[index]):
            self._cascade.append((source, (exact[source] / rest).limit_denominator(_LARGEST_DENOMINATOR)))
            rest -= exact[source]

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sources, counts), int64 like `positions` (n,): whose turn it is, and how many it has had before."""
        places = np.asarray(positions, dtype=np.int64)
        sources, counts = np.empty_like(places), np.empty_like(places)
        left = np.arange(len(places))
        for source, share in self._cascade:
            before = _rounded(places, share)
            taken = _rounded(places + 1, share) > before
            sources[left[taken]], counts[left[taken]] = source, before[taken]
            left, places = left[~taken], (places - before)[~taken]
        return sources, counts

    def before(self, source: int, position: int) -> int:
        """How many turns the source has had before the position."""
        for other, share in self._cascade:
            count = _rounded(position, share)
            if other == source:
                return count
            position -= count
        raise IndexError(source)

    def most(self, source: int, num_positions: int) -> int:
        """How many turns the source has at most in so many consecutive positions, wherever they begin."""
        left = num_positions  # at most, for this source and those after it
        for other, share in self._cascade:
            if other == source:
                return math.ceil(left * share)
            left -= math.floor(left * share)
        raise IndexError(source)

    def position(self, source: int, count: int) -> int:
        """The position of the source's turn number `count`, from 0 on."""
        end = 1
        while self.before(source, end) <= count:
            end *= 2
        return bisect_right(range(end), count, key=lambda position: self.before(source, position)) - 1


@dataclass(frozen=True)
class SourceSteps:
    """What steps take from one source, whose positions are counted by its own turns."""

    steps: Bounds
    turns: WeightedInterleaver
    source: int

    @property
    def since(self) -> int:
        return self.turns.before(self.source, self.steps.since)

    @property
    def earlier(self) -> SourceSteps | None:
        return None if self.steps.earlier is None else replace(self, steps=self.steps.earlier)

    def bounds(self, position: int) -> tuple[int, int]:
        first, end = self.steps.bounds(self.turns.position(self.source, position))
        return self.turns.before(self.source, first), self.turns.before(self.source, end)


def _rounded(numbers: Numbers, share: Fraction) -> Numbers:
    """round(numbers * share), halves up, in integers."""
    part, whole = share.numerator, share.denominator
    return numbers // whole * part + (numbers % whole * part + whole // 2) // whole


class SplitRows(Rows):
    """Rows that are those of several others, which `_split` finds."""

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        return self._gather(indices, lambda part, own, inside: part[own])

    def drawn(self, indices: np.ndarray, positions: np.ndarray, seed: int) -> RowArrays:
        return self._gather(indices, lambda part, own, inside: part.drawn(own, positions[inside], seed))

    def most_reads(self, indices: np.ndarray) -> tuple[int, int]:
        """Of the part in which the two are furthest apart."""
        return max((part.most_reads(own) for part, own, _ in self._split(indices)), key=lambda pair: pair[0] - pair[1])

    def num_inputs(self, indices: np.ndarray) -> int:
        return sum(part.num_inputs(own) for part, own, _ in self._split(indices))

    def width(self, indices: np.ndarray) -> int:
        return max(part.width(own) for part, own, _ in self._split(indices))

    @abstractmethod
    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        """(part, indices in it, where they are among the given ones) for each part that has any."""

    def _gather(self, indices: np.ndarray, read: Callable[[Rows, np.ndarray, np.ndarray], RowArrays]) -> RowArrays:
        found = [(inside, read(part, own, inside)) for part, own, inside in self._split(indices)]
        inputs = [(inside, arrays.inputs) for inside, arrays in found]
        return RowArrays(_merge(inputs), _merge([(inside, arrays.targets) for inside, arrays in found]))


class JoinedRows(SplitRows):
    """The rows of several sources, one source after the other: what is held out of them."""

    def __init__(self, parts: Sequence[Rows]):
        self._parts = tuple(parts)
        self.sequence_length = parts[0].sequence_length
        self.fingerprint = digest(type(self).__name__, [part.fingerprint for part in parts])
        self._starts = np.cumsum([0, *map(len, parts)])

    @property
    def parts(self) -> tuple[Rows, ...]:
        return self._parts

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def num_targets(self) -> int:
        return sum(part.num_targets for part in self.parts)

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        indices = np.asarray(indices, dtype=np.int64)
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        for owner in np.unique(owners):
            inside = np.flatnonzero(owners == owner)
            yield self.parts[owner], indices[inside] - self._starts[owner], inside


class MixedRows(JoinedRows):
    """Rows of several sources in turns. Each source's rows come in epochs of its own, every row once in each.

    weights: of rows, so where rows are packed also of tokens.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]):
        super().__init__(parts)
        self._turns = WeightedInterleaver(weights)
        self.shares = self._turns.shares
        self.fingerprint = digest(self.fingerprint, self.shares)

    def most_in_step(self, source: int, global_batch_size: int) -> int:
        """The most rows that a step takes from a source. That is one more than its share in some steps."""
        return self._turns.most(source, global_batch_size)

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        sources, counts = self._turns.at(positions)
        found = np.empty_like(sources)
        for source in np.unique(sources).tolist():
            inside = sources == source
            own_steps = None if steps is None else SourceSteps(steps, self._turns, source)
            own = self.parts[source].at_positions(counts[inside], seed + source, own_steps)
            found[inside] = self._starts[source] + own
        return found


def _merge(parts: list[tuple[np.ndarray, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """parts: (which rows, their arrays by name)."""
    if len(parts) == 1:
        return parts[0][1]
    num_rows = sum(len(inside) for inside, _ in parts)
    merged = {}
    for name, example in parts[0][1].items():
        merged[name] = np.empty((num_rows, *example.shape[1:]), dtype=example.dtype)
        for inside, arrays in parts:
            merged[name][inside] = arrays[name]
    return merged
