"""Rows of several whole documents each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.datasets.base import RowArrays, SampleRows, causal_arrays
from samecurve.data.packing import best_fit_decreasing

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
        rows = [self._row(index) for index in np.asarray(indices, dtype=np.int64)]
        places, positions, valid = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        return causal_arrays(self._take(places, valid), positions, self._targets(places + 1, valid))

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self._loads[indices].sum())

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the places of the row's inputs in the stream, their position_ids, and a mask of non-padding."""
        members = self.members[self.row_offsets[index] : self.row_offsets[index + 1]]
        sizes = self.sizes[members]
        firsts = np.cumsum(sizes) - sizes
        steps = np.arange(self.sequence_length)
        # Positions of the padding continue those of the last document, as in PackedRows.
        nth = np.searchsorted(firsts, steps, side="right") - 1
        positions = steps - firsts[nth]
        return self._starts[members][nth] + positions, positions, steps < sizes.sum()
