"""Weighted mixtures of data sets. The source of each position is a pure function of the position."""

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
    """Interleaves sources in proportion to their weights, without state: O(number of sources) at any position.

    The heaviest source gets round(share * n) of the first n turns. Of the remaining turns, the next source gets its
    share of the remaining weights, and so on. So after any n turns a source differs from its exact share by at most
    (1 + 1 + 1/2 + ... + 1/(k - 1)) / 2 turns, for k sources: less than 1 for two, less than 2 for ten. (The rounding
    error of the j-th source before this one is passed on with the factor weight / remaining weights, at most 1/j.)
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(weight)) for weight in weights]  # 0.7 in decimal, not its binary approximation
        self.shares = tuple(float(weight / sum(exact)) for weight in exact)
        self._cascade: list[tuple[int, Fraction]] = []
        rest = sum(exact)
        for source in sorted(range(len(exact)), key=lambda index: -exact[index]):
            self._cascade.append((source, (exact[source] / rest).limit_denominator(_LARGEST_DENOMINATOR)))
            rest -= exact[source]

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, counts), both int64 (n,): the source of each position, and its number of earlier turns."""
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
        """Count the turns of a source before a position."""
        for other, share in self._cascade:
            count = _rounded(position, share)
            if other == source:
                return count
            position -= count
        raise IndexError(source)

    def most(self, source: int, num_positions: int) -> int:
        """Return an upper bound on the turns of a source within any `num_positions` consecutive positions."""
        left = num_positions  # upper bound for this source and those after it
        for other, share in self._cascade:
            if other == source:
                return math.ceil(left * share)
            left -= math.floor(left * share)
        raise IndexError(source)

    def position(self, source: int, count: int) -> int:
        """Return the position of the source's turn number `count`, 0-based."""
        end = 1
        while self.before(source, end) <= count:
            end *= 2
        return bisect_right(range(end), count, key=lambda position: self.before(source, position)) - 1


@dataclass(frozen=True)
class SourceSteps:
    """Bounds of the steps within one source, with positions counted in the source's own turns (see sampler.Bounds)."""

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
    """Return round(numbers * share), halves up, in integer arithmetic."""
    part, whole = share.numerator, share.denominator
    # in two parts, because numbers * part can exceed int64
    return numbers // whole * part + (numbers % whole * part + whole // 2) // whole


class SplitRows(Rows):
    """Base of rows that are composed of several parts. `_split` assigns indices to parts."""

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        return self._gather(indices, lambda part, own, inside: part[own])

    def drawn(self, indices: np.ndarray, positions: np.ndarray, seed: int) -> RowArrays:
        return self._gather(indices, lambda part, own, inside: part.drawn(own, positions[inside], seed))

    def most_reads(self, indices: np.ndarray) -> tuple[int, int]:
        """Return (found, allowed) of the part in which they differ most."""
        return max((part.most_reads(own) for part, own, _ in self._split(indices)), key=lambda pair: pair[0] - pair[1])

    def num_inputs(self, indices: np.ndarray) -> int:
        return sum(part.num_inputs(own) for part, own, _ in self._split(indices))

    def width(self, indices: np.ndarray) -> int:
        return max(part.width(own) for part, own, _ in self._split(indices))

    @abstractmethod
    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        """Yield (part, indices within the part, their places among the given indices) for each part that has any."""

    def _gather(self, indices: np.ndarray, read: Callable[[Rows, np.ndarray, np.ndarray], RowArrays]) -> RowArrays:
        arrays_of_parts = [(inside, read(part, own, inside)) for part, own, inside in self._split(indices)]
        inputs = [(inside, arrays.inputs) for inside, arrays in arrays_of_parts]
        return RowArrays(_merge(inputs), _merge([(inside, arrays.targets) for inside, arrays in arrays_of_parts]))


class JoinedRows(SplitRows):
    """Concatenation of the rows of several sources, used for the held-out rows of a mixture."""

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
    """Interleaved rows of several sources. Each source has its own epochs, which read each of its rows once.

    The weights are fractions of rows; where rows are packed, also of tokens.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]):
        super().__init__(parts)
        self._turns = WeightedInterleaver(weights)
        self.shares = self._turns.shares
        self.fingerprint = digest(self.fingerprint, self.shares)

    def most_in_step(self, source: int, global_batch_size: int) -> int:
        """Return the largest number of rows that a step reads from a source; up to one more than its share."""
        return self._turns.most(source, global_batch_size)

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        sources, counts = self._turns.at(positions)
        rows = np.empty_like(sources)
        for source in np.unique(sources).tolist():
            inside = sources == source
            own_steps = None if steps is None else SourceSteps(steps, self._turns, source)
            own = self.parts[source].at_positions(counts[inside], seed + source, own_steps)
            rows[inside] = self._starts[source] + own
        return rows


def _merge(parts: list[tuple[np.ndarray, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Merge arrays by name. `parts` holds (places of the rows, arrays of those rows)."""
    if len(parts) == 1:
        return parts[0][1]
    num_rows = sum(len(inside) for inside, _ in parts)
    merged = {}
    for name, example in parts[0][1].items():
        merged[name] = np.empty((num_rows, *example.shape[1:]), dtype=example.dtype)
        for inside, arrays in parts:
            merged[name][inside] = arrays[name]
    return merged
