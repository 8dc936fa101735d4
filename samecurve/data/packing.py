"""Packing of documents into rows."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins, the largest item first, each into the fullest bin that has room for it.

    The number of bins is asymptotically at most 11/9 of the smallest possible number (Johnson, 1973).

    Args:
        sizes: (num_items,), each in [1, capacity].
        capacity: size of a bin.

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
