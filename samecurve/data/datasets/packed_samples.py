"""Rows of several whole documents each."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.datasets.base import RowArrays, SampleRows, causal_arrays

if TYPE_CHECKING:
    from samecurve.data.token_store import TokenStream
    from samecurve.specs.data_names import Truncation


class PackedSampleRows(SampleRows):
    """Rows of several whole documents, packed by best-fit-decreasing.

    The assignment of documents to rows is a pure function of their lengths. position_ids restart at each document.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int, truncation: Truncation = "right"):
        super().__init__(stream, sequence_length, padding_token, truncation)
        self.members, self.row_offsets = best_fit_decreasing(self.sizes, sequence_length)
        self._loads = np.diff(np.concatenate([[0], np.cumsum(self.sizes[self.members])])[self.row_offsets])

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        steps, rows = np.arange(self.sequence_length), []
        for index in np.asarray(indices, dtype=np.int64):
            members = self.members[self.row_offsets[index] : self.row_offsets[index + 1]]
            sizes = self.sizes[members]
            firsts = np.cumsum(sizes) - sizes
            # Positions of the padding continue those of the last document, as in PackedRows.
            nth = np.searchsorted(firsts, steps, side="right") - 1
            positions = steps - firsts[nth]
            rows.append((self._starts[members][nth] + positions, positions, steps < sizes.sum()))
        places, positions, valid = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        of_targets = places + 1, valid
        inputs = self._take(places, valid)
        return causal_arrays(inputs, positions, self._targets(*of_targets), self._weights(*of_targets))

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self._loads[indices].sum())


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins, the largest item first, each into the fullest bin that has room for it.

    The number of bins is asymptotically at most 11/9 of the smallest possible number (Johnson, 1973).

    Args:
        sizes: (num_items,), each in [1, capacity].

    Returns:
        (members, offsets): bin i holds the items members[offsets[i]:offsets[i + 1]].
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room in order
    # stable, because otherwise the order of equal sizes depends on the CPU (numpy issue 24064)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            room, index = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            index = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bins[index].append(item)
        if room > size:
            if room - size not in by_room:
                insort(rooms, room - size)
            by_room.setdefault(room - size, []).append(index)
    offsets = np.cumsum([0, *map(len, bins)])
    return np.array([item for members in bins for item in members], dtype=np.int64), offsets
