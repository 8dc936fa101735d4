"""A layout's ranks by node, the links of its groups, and what does not divide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from samecurve.errors import ConfigurationError
from samecurve.planner.hardware import profile
from samecurve.planner.inputs import Wanted
from samecurve.planner.job import ORDER, Job, group_link
from samecurve.planner.links import Link
from samecurve.planner.strategies import Template, describe
from samecurve.strategy.parallel_dims import BATCH, ParallelDims

Order = tuple[str, ...]
SHOWN_NODES = 12
NAMES = {"pp": "stage", "dp": "data-parallel rank", "cp": "sequence part", "tp": "tensor part"}


@dataclass(frozen=True)
class Axis:
    """A parallel axis: its size, and the distance of neighbouring ranks of one group."""

    name: str
    size: int
    stride: int

    def index(self, rank: int) -> int:
        return rank // self.stride % self.size


def read_order(text: str) -> Order:
    """Read `--order`: all of tp, cp, dp and pp, the fastest-varying first. Raises ConfigurationError."""
    order = tuple(text.replace("-", ",").split(","))
    if sorted(order) != sorted(ORDER):
        raise ConfigurationError(f"--order {text}: expected each of {', '.join(ORDER)} once, such as {','.join(ORDER)}")
    return order


def axes(job: Job, order: Order = ORDER) -> list[Axis]:
    """List the axes that a layout uses, the fastest-varying first; dp as shards and replicas under hybrid sharding.

    FSDP shards over the ranks of context parallelism, too, so that `shard` counts them.
    """
    layout, used = job.layout, []
    own = max(1, layout.shard // layout.cp)
    for name in order:
        size, stride = getattr(layout, name), layout.stride(name, order)
        if name == "dp" and 1 < own < size:
            used += [Axis("shard", own, stride), Axis("replica", size // own, stride * own)]
        elif size > 1:
            used.append(Axis(name, size, stride))
    return used


def ranks_of(job: Job, node: int) -> range:
    return range(node * job.gpus_per_node, min((node + 1) * job.gpus_per_node, job.layout.gpus))


def cell(job: Job, rank: int, order: Order = ORDER) -> str:
    """Name a GPU by a letter and an index for each axis that varies inside its node: `d0t1`."""
    ranks = ranks_of(job, rank // job.gpus_per_node)
    varying = [axis for axis in reversed(axes(job, order)) if len({axis.index(other) for other in ranks}) > 1]
    return "".join(f"{axis.name[0]}{axis.index(rank)}" for axis in varying) or "0"


def in_common(job: Job, node: int, order: Order = ORDER) -> str:
    """Say what all GPUs of a node have in common: `stage 0, replica 1`."""
    ranks = ranks_of(job, node)
    common = [axis for axis in reversed(axes(job, order)) if len({axis.index(rank) for rank in ranks}) == 1]
    return ", ".join(f"{NAMES.get(axis.name, axis.name)} {axis.index(ranks[0])}" for axis in common)


@dataclass(frozen=True)
class Groups:
    """The groups of one axis, or of two whose ranks communicate together.

    Attributes:
        nodes: that a group touches.
        link: what it communicates over while all such groups do.
    """

    axis: str
    size: int
    stride: int
    first: tuple[int, ...]
    nodes: int
    link: Link


def groups(job: Job, order: Order = ORDER) -> list[Groups]:
    """List the groups that communicate, the fastest-varying axis first.

    Gradients are reduced, and FSDP's weights gathered, over the ranks of dp and cp together. Experts are spread over
    neighbours in dp, and so are the second copies of weights of ZeRO-3 (hpZ).
    """
    layout, stride = job.layout, job.layout.stride("dp", order)
    parts = [Axis("cp", layout.cp, layout.stride("cp", order))] if layout.cp > 1 else []
    listed = [_groups(job, [axis, *parts] if axis.name in ("dp", "shard") else [axis]) for axis in axes(job, order)]
    beside = (("ep", layout.ep), ("second copy", layout.secondary))
    return listed + [_groups(job, [Axis(name, size, stride)]) for name, size in beside if size > 1]


def _groups(job: Job, together: Sequence[Axis]) -> Groups:
    """Describe the groups of ranks that differ in these axes alone."""
    ranks = sorted(sum(place) for place in product(*(range(0, e.size * e.stride, e.stride) for e in together)))
    # the distance of neighbours; on average, where the axes have another one between them
    stride = ranks[-1] // (len(ranks) - 1)
    name = " x ".join(axis.name for axis in together)
    talking = 2 if name == "pp" else len(ranks)  # stages talk to their neighbours only
    nodes = len({rank // job.gpus_per_node for rank in ranks})
    link = group_link(job, talking, stride, profile(job.stack))
    return Groups(name, len(ranks), stride, tuple(ranks), nodes, link)


def complaints(job: Job, order: Order = ORDER) -> Iterator[str]:
    """Say what is wrong or slow about a layout."""
    layout, shape, node = job.layout, job.shape, job.gpus_per_node
    if layout.tp > 1 and (layout.tp - 1) * layout.stride("tp", order) >= node:
        yield f"tp {layout.tp} crosses nodes of {node} GPUs: every layer waits for the network; make it smaller"
    elif layout.tp > 1 and node % (layout.tp * layout.stride("tp", order)):
        yield f"tp {layout.tp} does not divide {node} GPUs per node: some groups cross nodes, others do not"
    if layout.pp > 1 and layout.stride("pp", order) < node < layout.gpus:
        yield f"pp {layout.pp}: neighbouring stages share a node, so that larger messages cross; put pp last"
    divided = (
        ("heads", shape.heads, "tp", layout.tp),
        ("key and value heads", shape.kv_heads, "tp", layout.tp),
        ("layers", shape.layers, "pp", layout.pp),
        ("experts", shape.experts, "ep", layout.ep),
        ("data-parallel ranks", layout.dp, "ep", layout.ep),
        # gathered keys and the ring give each rank a chunk from either end of a row (head_tail.py)
        ("tokens of a row", job.seq, "2 x cp", 2 * layout.cp if layout.cp > 1 else 1),
    )
    for name, count, axis, size in divided:
        if count % size:
            yield f"{count} {name} are not divisible by {axis} {size}: parts are uneven or refused"


def uneven_rows(global_batch: int, job: Job) -> list[str]:
    """Say where ranks read different numbers of rows."""
    ranks = job.layout.dp
    few, more = divmod(global_batch, ranks)
    return [f"{global_batch} rows on {ranks} ranks: {more} of them read {few + 1}, the others {few}"] if more else []


def picture(job: Job, global_batch: int, order: Order = ORDER) -> str:
    """Draw nodes, groups and what is wrong. Of many nodes, the first ones and the last are drawn."""
    count = -(-job.layout.gpus // job.gpus_per_node)
    nodes = list(range(count)) if count <= SHOWN_NODES else [*range(SHOWN_NODES - 1), count - 1]
    lines = [f"Ranks vary first in {', then in '.join(axis.name for axis in axes(job, order)) or 'nothing'}"]
    width = max(len(cell(job, rank, order)) for node in nodes for rank in ranks_of(job, node))
    before = -1
    for node in nodes:
        if node != before + 1:
            lines.append(f"... {node - before - 1} more nodes in the same order")
        cells = " ".join(cell(job, rank, order).ljust(width) for rank in ranks_of(job, node))
        lines.append(f"node {node:<5}| {cells} |  {in_common(job, node, order)}".rstrip())
        before = node
    for group in groups(job, order):
        where = "inside a node" if group.nodes == 1 else f"over {group.nodes} nodes"
        if group.axis == "pp":
            where += f", neighbours {group.stride} ranks apart"
        first = ", ".join(map(str, group.first[:4])) + (", ..." if group.size > 4 else "")
        rate = f"{group.link.bus_gb_per_s:.0f} GB/s per rank over the {group.link.level}"
        lines.append(f"{group.axis} {group.size}: {where}, {rate}; the first group is ranks {first}")
    problems = [*complaints(job, order), *uneven_rows(global_batch, job)]
    return "\n".join([*lines, *(f"attention: {problem}" for problem in problems)])


# Resolves every rank of a job, without torch: its place, its groups, its rows and its micro-batches.


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
    ranks = []
    for number in range(dims.world_size):
        place, reader = dims.place(number), dims.index(number, *BATCH)
        ranks.append(Rank(number, place, (starts[reader], starts[reader + 1]), tuple(micro_batches[reader])))
    return ranks


def report(wanted: Wanted, template: Template, sizes: dict[str, int], job: Job, shown: int = 0) -> tuple[str, bool]:
    """Resolve all ranks of a choice.

    Args:
        shown: rank to describe.

    Returns:
        The text to print, and whether nothing is wrong; what is uneven or slow is no error.
    """
    strategy, problems = describe(wanted, template, sizes, job.layout.gpus)
    ranks = resolve(wanted, strategy.dims)
    wrong = [f"{problem.key}: {problem.text}" for problem in problems]
    used = " x ".join(f"{name} {size}" for name, size in strategy.dims.sizes.items() if size > 1) or "one process"
    used += f", experts over {strategy.dims.ep} of dp_shard" if strategy.dims.ep > 1 else ""
    rank = ranks[min(shown, len(ranks) - 1)]
    place = ", ".join(f"{name} {rank.place[name]}" for name, size in strategy.dims.sizes.items() if size > 1) or "alone"
    rows = f"rows {rank.rows[0]} to {rank.rows[1] - 1}" if rank.rows[1] > rank.rows[0] else "no row"
    batches = ", ".join(f"{count} x {size}" for size, count in Counter(rank.micro_batches).items())
    lines = [f"{len(ranks):,} ranks resolved: {used}; {wanted.batch.global_batch_size} rows per step"]
    lines.append(f"rank {rank.number}: {place}; {rows} of each step, micro-batches {batches} rows")
    lines += [f"wrong: {text}" for text in wrong]
    uneven = uneven_rows(wanted.batch.global_batch_size, job)
    lines += [f"note: {text}" for text in [*uneven, *complaints(job, ORDER)]]
    return "\n".join(lines), not wrong
