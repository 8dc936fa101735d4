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


@lru_cache(maxsize=64)
def _balanced(weights: tuple[int, ...], parts: int) -> list[int]:
    """Find where parts start and end so that the largest and the smallest sum differ least, as DeepSpeed does.

    Of equal divisions, that of DeepSpeed 0.19's `partition_balanced`: in each step of its dynamic program, the last.
    """
    if len(weights) <= parts:
        return [min(part, len(weights)) for part in range(parts + 1)]
    sums = [0, *accumulate(weights)]
    # by number of items: largest and smallest part, and where the last part starts
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0, float("inf"), 0)}]
    for part in range(1, parts + 1):
        found: dict[int, tuple[float, float, int]] = {}
        for end in range(part, len(weights) + 1):
            for start, (most, least, _) in best[-1].items():
                if start < end:
                    own = sums[end] - sums[start]
                    largest, smallest = max(most, own), min(least, own)
                    if end not in found or found[end][0] - found[end][1] >= largest - smallest:
                        found[end] = largest, smallest, start
        best.append(found)
    ends = [len(weights)]
    for found in reversed(best[1:]):
        ends.append(found[ends[-1]][2])
    return ends[::-1]
