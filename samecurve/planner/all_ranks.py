"""Resolves every rank of a job, without torch: its place, its groups, its rows and its micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from samecurve.planner import placement
from samecurve.planner.job import Job
from samecurve.planner.layout import ORDER
from samecurve.planner.strategies import describe
from samecurve.planner.strategy_files import Template
from samecurve.planner.wanted import Wanted
from samecurve.strategy.parallel_dims import BATCH, DIMENSIONS, ParallelDims


@dataclass(frozen=True)
class Rank:
    """One rank.

    Attributes:
        place: its index in each parallel dimension.
        rows: of each step that it reads, as (first, behind the last) of the global batch.
        micro_batches: rows of each of them.
    """

    number: int
    place: dict[str, int]
    rows: tuple[int, int]
    micro_batches: tuple[int, ...]


def resolve(wanted: Wanted, dims: ParallelDims) -> list[Rank]:
    """Resolve all ranks as the engines do: ranks that differ in tp, cp or pp alone read the same rows."""
    readers = dims.size(*BATCH)
    shares, micro_batches = wanted.batch.rows_per_rank(readers), wanted.batch.micro_batches(readers)
    starts = [0]
    for share in shares:
        starts.append(starts[-1] + share)
    found = []
    for number in range(dims.world_size):
        place, reader = dims.place(number), dims.index(number, *BATCH)
        found.append(Rank(number, place, (starts[reader], starts[reader + 1]), tuple(micro_batches[reader])))
    return found


def problems(wanted: Wanted, dims: ParallelDims, ranks: list[Rank], job: Job) -> Iterator[str]:
    """Say what is wrong with the ranks as a whole.

    Args:
        wanted: gives the batch that the ranks' rows have to cover.
        ranks: all ranks, from `resolve`.
        job: the planner's description of the same strategy.
    """
    if len({tuple(rank.place.values()) for rank in ranks}) != len(ranks):
        yield "two ranks have the same place"
    for name in (each for each in DIMENSIONS if dims.size(each) > 1):
        sizes = Counter(tuple(rank.place[other] for other in DIMENSIONS if other != name) for rank in ranks)
        if set(sizes.values()) != {dims.size(name)}:
            yield f"{name}: groups of {sorted(set(sizes.values()))} ranks, expected {dims.size(name)} in each"
    batch, readers = wanted.batch, dims.size(*BATCH)
    # end to end, the distinct ranges have to cover the batch: each begins where the one before it ends
    read = sorted({rank.rows for rank in ranks if rank.rows[0] < rank.rows[1]})
    ends = [0, *(end for _, end in read)]
    if [first for first, _ in read] != ends[:-1] or ends[-1] != batch.global_batch_size:
        yield f"the ranks' rows do not make the {batch.global_batch_size} rows of a step"
    for rank in ranks:
        if sum(rank.micro_batches) != rank.rows[1] - rank.rows[0]:
            yield f"rank {rank.number}: micro-batches of {list(rank.micro_batches)} rows, but it reads {rank.rows}"
    steps = {len(rank.micro_batches) for rank in ranks}
    if steps != {batch.accumulation_steps(readers)}:
        yield f"ranks take {sorted(steps)} micro-batches per step, expected {batch.accumulation_steps(readers)} on each"
    if job.layout.gpus != len(ranks):
        yield f"the layout has {job.layout.gpus} ranks, the strategy {len(ranks)}"


def report(wanted: Wanted, template: Template, sizes: dict[str, int], job: Job, shown: int = 0) -> tuple[str, bool]:
    """Check all ranks of a choice.

    Args:
        shown: rank to describe.

    Returns:
        The text to print, and whether nothing is wrong; what is uneven or slow is no error.
    """
    strategy, found = describe(wanted, template, sizes, job.layout.gpus)
    ranks = resolve(wanted, strategy.dims)
    wrong = [*(f"{each.key}: {each.text}" for each in found), *problems(wanted, strategy.dims, ranks, job)]
    used = " x ".join(f"{name} {size}" for name, size in strategy.dims.sizes.items() if size > 1) or "one process"
    used += f", experts over {strategy.dims.ep} of dp_shard" if strategy.dims.ep > 1 else ""
    rank = ranks[min(shown, len(ranks) - 1)]
    place = ", ".join(f"{name} {rank.place[name]}" for name, size in strategy.dims.sizes.items() if size > 1) or "alone"
    rows = f"rows {rank.rows[0]} to {rank.rows[1] - 1}" if rank.rows[1] > rank.rows[0] else "no row"
    batches = ", ".join(f"{count} x {size}" for size, count in Counter(rank.micro_batches).items())
    lines = [f"{len(ranks):,} ranks resolved: {used}; {wanted.batch.global_batch_size} rows per step"]
    lines.append(f"rank {rank.number}: {place}; {rows} of each step, micro-batches {batches} rows")
    lines += [f"wrong: {each}" for each in wrong]
    uneven = placement.uneven_rows(wanted.batch.global_batch_size, job)
    lines += [f"note: {each}" for each in [*uneven, *placement.complaints(job, ORDER)]]
    return "\n".join(lines), not wrong
