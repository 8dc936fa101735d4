"""Excerpts of a checkpoint's index: rank 0 alone reads it, and each rank gets the entries of its own regions.

The index lists the regions of all ranks that wrote the checkpoint. With 16,384 ranks and 300 parameters it has 100 MB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint.format import CheckpointReader, parse_entry, read_index
from samecurve.interfaces.region import Region

if TYPE_CHECKING:
    from samecurve.distributed.control_group import ControlGroup

Wanted = Sequence[tuple[str, Region]]


def open_shared(
    folder: Path, world: ControlGroup, wanted: Wanted, shapes: Mapping[str, Iterable[int]]
) -> CheckpointReader:
    """Open a checkpoint for reading the wanted regions only. Collective.

    Args:
        wanted: (name, region) of everything that this rank will read.
        shapes: the model's, which the checkpoint's must match.

    Raises:
        CheckpointError: the index cannot be read, or is of another model; raised on all ranks.
    """
    return CheckpointReader(
        folder, world.gather_scatter(list(wanted), lambda of_all: _excerpts(folder, shapes, of_all))
    )


def _excerpts(folder: Path, shapes: Mapping[str, Iterable[int]], of_all: Iterable[Wanted]) -> list[dict]:
    content = read_index(folder)
    CheckpointReader(folder, content).check_names(shapes)
    entries = {name: _Entries(item["ranges"]) for name, item in content.items()}
    excerpts = []
    for wanted in of_all:
        ranges: dict[str, list] = {}
        for name, region in wanted:
            known = ranges.setdefault(name, [])
            known += [entry for entry in entries[name].near(region) if entry not in known]
        excerpts.append({name: {"shape": content[name]["shape"], "ranges": near} for name, near in ranges.items()})
    return excerpts


class _Entries:
    """The entries of one parameter, sorted by where their regions begin."""

    def __init__(self, ranges: list[list[int]]):
        self._entries = sorted(ranges, key=lambda entry: entry[1])
        regions = [parse_entry(entry)[1] for entry in self._entries]
        self._starts = [region.start for region in regions]
        self._longest = max((_stop(region) - region.start for region in regions), default=0)

    def near(self, region: Region) -> list[list[int]]:
        """List the entries that may share values with a region, and few others."""
        # even the longest entry does not reach the region if it begins before this
        first = bisect_left(self._starts, region.start - self._longest + 1)
        return self._entries[first : bisect_left(self._starts, _stop(region))]


def _stop(region: Region) -> int:
    return region.start + (region.count - 1) * region.stride + region.length
