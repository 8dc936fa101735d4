"""A strategy's ranks by node, the links of its groups, what does not divide, and the rows of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from samecurve.config.schema_training import Batch
from samecurve.planner.hardware import profile
from samecurve.planner.job import Job, group_link
from samecurve.planner.links import Link
from samecurve.strategy.parallel_dims import BATCH, DIMENSIONS, FSDP, ParallelDims

SHOWN_NODES = 12
NAMES = {"pp": "stage", "dp": "data-parallel rank", "cp": "sequence part", "tp": "tensor part"}


def used(dims: ParallelDims) -> dict[str, str]:
    """Return the short names of the dimensions in use, the fastest-varying first: one alone of two for data is dp."""
    both = dims.dp_replicate > 1 and dims.dp_shard > 1
    short: dict[str, str] = {"dp_replicate": "replica", "dp_shard": "shard"}
    short = short if both else {name: "dp" for name in BATCH}
    return {name: short.get(name, name) for name in reversed(DIMENSIONS) if dims.size(name) > 1}


@dataclass(frozen=True)
class Groups:
    """The groups of one dimension, or of two whose ranks communicate together.

    Attributes:
        first: ranks of the first group.
        stride: distance of neighbours; on average, where another dimension lies between them.
        nodes: that a group touches.
        link: what it communicates over while all such groups do.
    """

    name: str
    first: tuple[int, ...]
    stride: int
    nodes: int
    link: Link


def groups(job: Job) -> list[Groups]:
    """List the groups that communicate, the fastest-varying dimension first.

    Gradients are reduced, and FSDP's weights gathered, over the ranks of dp and cp together. Experts are spread over
    neighbours in dp, and so are the second copies of weights of ZeRO-3 (hpZ).
    """
    dims, listed = job.dims, []
    for dimension, name in used(dims).items():
        together: tuple[str, ...] = (
            FSDP if dimension == "dp_shard" else (dimension, "cp") if name == "dp" else (dimension,)
        )
        name = f"{name} x cp" if len(together) > 1 and dims.cp > 1 else name
        listed.append(_groups(job, name, dims.groups(*together)[0]))
    neighbours = dims.size("cp", "tp")
    for name, size in (("ep", dims.ep), ("second copy", job.strategy.secondary_partition)):
        if size > 1:
            listed.append(_groups(job, name, list(range(0, size * neighbours, neighbours))))
    return listed


def _groups(job: Job, name: str, first: list[int]) -> Groups:
    stride = first[-1] // (len(first) - 1)
    talking = 2 if name == "pp" else len(first)  # stages talk to their neighbours only
    nodes = len({rank // job.gpus_per_node for rank in first})
    return Groups(name, tuple(first), stride, nodes, group_link(job, talking, stride, profile(job.stack)))


def complaints(job: Job) -> Iterator[str]:
    """Say what is wrong or slow about a strategy's sizes."""
    dims, shape, node = job.dims, job.shape, job.gpus_per_node
    if dims.tp > node:
        yield f"tp {dims.tp} crosses nodes of {node} GPUs: every layer waits for the network; make it smaller"
    elif node % dims.tp:
        yield f"tp {dims.tp} does not divide {node} GPUs per node: some groups cross nodes, others do not"
    divided = (
        ("heads", shape.heads, "tp", dims.tp),
        ("key and value heads", shape.kv_heads, "tp", dims.tp),
        ("layers", shape.layers, "pp", dims.pp),
        ("experts", shape.experts, "ep", dims.ep),
        ("data-parallel ranks", dims.dp, "ep", dims.ep),
        # gathered keys and the ring give each rank a chunk from either end of a row (head_tail.py)
        ("tokens of a row", job.seq, "2 x cp", 2 * dims.cp if dims.cp > 1 else 1),
    )
    for name, count, dimension, size in divided:
        if count % size:
            yield f"{count} {name} are not divisible by {dimension} {size}: parts are uneven or refused"


def uneven_rows(global_batch: int, job: Job) -> list[str]:
    """Say where ranks read different numbers of rows."""
    few, more = divmod(global_batch, job.dims.dp)
    told = f"{global_batch} rows on {job.dims.dp} ranks: {more} of them read {few + 1}, the others {few}"
    return [told] if more else []


def picture(job: Job, global_batch: int) -> str:
    """Draw nodes, groups and what is wrong. Of many nodes, the first ones and the last are drawn.

    A GPU is a letter and an index for each dimension that varies inside its node (`d0t1`); behind the node stands what
    all of its GPUs have in common.
    """
    dims, names = job.dims, used(job.dims)
    count = -(-dims.world_size // job.gpus_per_node)
    nodes = list(range(count)) if count <= SHOWN_NODES else [*range(SHOWN_NODES - 1), count - 1]
    lines = [f"Ranks vary first in {', then in '.join(names.values()) or 'nothing'}"]
    drawn = []
    for node in nodes:
        ranks = range(node * job.gpus_per_node, min((node + 1) * job.gpus_per_node, dims.world_size))
        places = [dims.place(rank) for rank in ranks]
        outermost = [*reversed(names)]
        varying = [name for name in outermost if len({place[name] for place in places}) > 1]
        common = [
            f"{NAMES.get(names[name], names[name])} {places[0][name]}" for name in outermost if name not in varying
        ]
        cells = ["".join(f"{names[name][0]}{place[name]}" for name in varying) or "0" for place in places]
        drawn.append((node, cells, ", ".join(common)))
    width = max(len(cell) for _, cells, _ in drawn for cell in cells)
    for node, cells, common in drawn:
        if node == count - 1 and count > SHOWN_NODES:
            lines.append(f"... {count - SHOWN_NODES} more nodes in the same order")
        lines.append(f"node {node:<5}| {' '.join(cell.ljust(width) for cell in cells)} |  {common}".rstrip())
    for group in groups(job):
        where = "inside a node" if group.nodes == 1 else f"over {group.nodes} nodes"
        if group.name == "pp":
            where += f", neighbours {group.stride} ranks apart"
        size = len(group.first)
        first = ", ".join(map(str, group.first[:4])) + (", ..." if size > 4 else "")
        rate = f"{group.link.bus_gb_per_s:.0f} GB/s per rank over the {group.link.level}"
        lines.append(f"{group.name} {size}: {where}, {rate}; the first group is ranks {first}")
    problems = [*complaints(job), *uneven_rows(global_batch, job)]
    return "\n".join([*lines, *(f"attention: {problem}" for problem in problems)])


def rows_of(batch: Batch, dims: ParallelDims, rank: int) -> tuple[range, list[int]]:
    """Return the rows of the global batch that a rank reads, and the rows of each of its micro-batches.

    Ranks that differ in tp, cp or pp alone read the same rows.
    """
    shares, reader = batch.rows_per_rank(dims.dp), dims.index(rank, *BATCH)
    start = sum(shares[:reader])
    return range(start, start + shares[reader]), list(batch.micro_batches(dims.dp)[reader])


def report(batch: Batch, job: Job, rank: int) -> str:
    """Describe one rank of a job: its place, its rows and its micro-batches; and what is uneven or slow."""
    dims, names = job.dims, [name for name in DIMENSIONS if job.dims.size(name) > 1]
    sizes = " x ".join(f"{name} {dims.size(name)}" for name in names) or "one process"
    sizes += f", experts over {dims.ep} of dp_shard" if dims.ep > 1 else ""
    place, (rows, micro_batches) = dims.place(rank), rows_of(batch, dims, rank)
    shown = f"rows {rows[0]} to {rows[-1]}" if rows else "no row"
    counts = ", ".join(f"{count} x {size}" for size, count in Counter(micro_batches).items())
    where = ", ".join(f"{name} {place[name]}" for name in names) or "alone"
    lines = [f"{dims.world_size:,} ranks: {sizes}; {batch.global_batch_size} rows per step"]
    lines.append(f"rank {rank}: {where}; {shown} of each step, micro-batches {counts} rows")
    return "\n".join(
        [*lines, *(f"note: {text}" for text in [*uneven_rows(batch.global_batch_size, job), *complaints(job)])]
    )
