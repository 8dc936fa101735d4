"""The header's lines about the batch: how the rows of a step fall on ranks and micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from samecurve.config.schema_training import Batch


def batch_lines(batch: Batch, ranks: int, padded: bool) -> list[tuple[str, str]]:
    """Build the lines as (label, text) pairs; an uneven division has one for its cost.

    Args:
        batch: the recipe's batch.
        ranks: number of data-parallel ranks.
        padded: whether every micro-batch has the rows of the largest one, as in a pipeline.
    """
    rows, shares = batch.global_batch_size, batch.micro_batches(ranks)
    steps, most = len(shares[0]), max(map(max, shares))
    if rows == most * steps * ranks:
        return [("batch", f"{rows} rows = {most} micro x {steps} accumulation x {ranks} data-parallel")]
    groups = Counter(tuple(share) for share in shares)
    split = "; ".join(f"{_sum(share)} on {count} of {ranks} ranks" for share, count in groups.items())
    busiest = most * steps if padded else sum(shares[0])
    idle = 1 - rows / (busiest * ranks)
    lines = [("batch", f"{rows} rows = {_sum(shares[0]) if ranks == 1 else split}")]
    return lines + [("", f"the uneven division leaves {idle:.1%} of the devices' time unused")] * (idle > 0)


def _sum(sizes: Iterable[int]) -> str:
    """Write a rank's micro-batches as a sum: 4 x 7 + 4."""
    terms = Counter(sizes).items()  # in order of appearance: the full ones, the rest, the empty ones
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in terms)
