"""Division of a model's layers over the stages of DeepSpeed's pipeline."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate, pairwise

from samecurve.planner.shape import ModelShape


def divide(shape: ModelShape, stages: int, partition: str) -> list[int]:
    """Return the decoder layers of each stage; embeddings, layers, last norm and head are divided in this order.

    Args:
        partition: `pipeline.partition` of a DeepSpeed JSON: parameters, uniform, or type: and a regular expression.
    """
    names = ["TokenEmbedding", *(["PositionEmbedding"] if shape.positions else []), *["Decoder"] * shape.layers]
    names += ["FinalNorm", "TokenEmbedding" if shape.tied else "HeadLayer"]  # as models/pipeline_split.py names them
    sizes = {
        "TokenEmbedding": shape.vocab * shape.hidden,
        "PositionEmbedding": shape.positions * shape.hidden,
        "Decoder": round(shape.layer_parameters),
        "FinalNorm": shape.hidden,
        "HeadLayer": shape.head_parameters,
    }
    if partition.startswith("type:"):
        wanted = re.compile(partition.partition(":")[2], re.IGNORECASE)
        weights = tuple(int(bool(wanted.search(name))) for name in names)
    else:
        weights = tuple(sizes[name] for name in names)
    ends = _uniform(len(names), stages) if partition == "uniform" else _balanced(weights, stages)
    return [names[start:end].count("Decoder") for start, end in pairwise(ends)]


def _uniform(count: int, parts: int) -> list[int]:
    size, rest = divmod(count, parts)  # the first stages have one more
    return [part * size + min(part, rest) for part in range(parts + 1)]


def _balanced(weights: tuple[int, ...], parts: int) -> list[int]:
    """Find where parts start and end so that the largest and the smallest sum differ least, as DeepSpeed does.

    Of equal divisions, that of DeepSpeed 0.19's `partition_balanced`: in each step of its dynamic program, the last.
    """
    if len(weights) <= parts:
        return [min(part, len(weights)) for part in range(parts + 1)]
    tables = [_table(weights, part) for part in range(1, parts + 1)]
    ends = [len(weights)]
    for found in reversed(tables):
        ends.append(found[ends[-1]][2])
    return ends[::-1]


@lru_cache(maxsize=1024)
def _table(weights: tuple[int, ...], parts: int) -> dict[int, tuple[int, int, int]]:
    """Divide the first items, of every number, into parts: the largest and the smallest, and where the last starts."""
    sums = [0, *accumulate(weights)]
    if parts == 1:
        return {end: (sums[end], sums[end], 0) for end in range(1, len(sums))}
    before, found = _table(weights, parts - 1), {}
    for end in range(parts, len(sums)):
        least_cost = None
        for start in range(end - 1, parts - 2, -1):
            own = sums[end] - sums[start]
            # the smallest of the parts before is at most their mean, so all further ones cost more
            if least_cost is not None and (own - least_cost) * (parts - 1) > sums[start]:
                break
            most, least, _ = before[start]
            largest, smallest = most if most > own else own, least if least < own else own
            if least_cost is None or largest - smallest < least_cost:
                least_cost = largest - smallest
                found[end] = largest, smallest, start
    return found
