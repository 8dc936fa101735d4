"""The shapes that a search compares: parallel sizes, micro-batches and recomputation.

This version can run what the files in configs/ describe, with other sizes of the axes that they set. Shapes that no
file describes are compared, too, so that a plan shows what they would bring; nothing is ever emitted for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from samecurve.planner.cluster import Cluster
from samecurve.planner.layout import Layout
from samecurve.planner.strategy_files import Template
from samecurve.planner.wanted import Wanted

Sizes = dict[str, int]
LONGEST_PIPELINE = 64
CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
LEAST_CONTEXT = 8192  # tokens of a row from which splitting it is worth a look
AXIS_NAMES = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "pp": "pipeline stages",
}


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def powers(limit: int) -> list[int]:
    """List the powers of two up to a limit."""
    return [2**exponent for exponent in range(max(limit, 1).bit_length())]


def sizes(template: Template, wanted: Wanted, machines: Cluster) -> Iterator[Sizes]:
    """Generate the sizes of a strategy file's axes to compare; which ones are legal is for its own check to say."""
    gpus, most = machines.gpus, wanted.shape.layers // template.stages_per_rank
    heads = wanted.shape.heads if template.by_heads else 0
    # For short rows one size of context parallelism, the file's own, is enough to compare.
    parts = CONTEXT_SIZES[1:] if wanted.batch.sequence_length >= LEAST_CONTEXT else ()
    choices = {
        "pp": [each for each in divisors(gpus) if 1 < each <= min(most, LONGEST_PIPELINE)],
        "dp_replicate": [each for each in divisors(gpus) if each in (*powers(gpus), machines.nodes) and each > 1],
        "cp": [each for each in parts if gpus % each == 0 and heads % each == 0],
        "tp": [each for each in divisors(gpus) if 1 < each <= machines.gpus_per_node],
        "ep": [each for each in divisors(math.gcd(gpus, wanted.shape.experts)) if 1 < each <= machines.gpus_per_node],
        "hpz": [each for each in divisors(machines.gpus_per_node) if 1 < each < gpus],
        "tp_sequence": [False, True],
    }
    # Where a number of GPUs has no legal size, the file's own one lets its check say why.
    own = {axis: [size] if (size := template.size(axis)) else [] for axis in template.axes}
    yield from (
        dict(zip(template.axes, found, strict=True))
        for found in product(*(choices[axis] or own[axis] for axis in template.axes))
    )


def micro_batches(wanted: Wanted, ranks: int) -> list[int]:
    """List micro-batch sizes in ascending order, at most the rows of a rank."""
    if "micro_batch" in wanted.fixed:
        return [wanted.batch.micro_batch_size]
    most = wanted.rows_of_a_rank(ranks)
    return sorted({*powers(most), most, min(wanted.batch.micro_batch_size, most)})


def checkpointings(wanted: Wanted) -> list[str]:
    """List the kinds of recomputation to compare, the fastest first."""
    if "checkpointing" in wanted.fixed:
        return [wanted.checkpointing]
    recipe = wanted.source.recipe
    # Liger rotates queries and keys in place, which selective recomputation keeps
    whole = recipe and (recipe.model.kernels == "liger" or recipe.memory.selective_save == "attention")
    selective = [] if whole else ["selective"]
    return list(dict.fromkeys(["none", wanted.checkpointing, *selective, "full"]))


def unavailable(wanted: Wanted, machines: Cluster, templates: Sequence[Template]) -> Iterator[tuple[Layout, str]]:
    """Generate legal layouts that no strategy file describes, each with what this version lacks.

    Tensor parallelism stays inside a node, with sequence parallelism. Weights are sharded over the data-parallel ranks,
    or, in a pipeline, whose micro-batches would gather them again and again, the optimizer alone.
    """
    shape, gpus = wanted.shape, machines.gpus
    tensor = [each for each in powers(machines.gpus_per_node) if shape.heads % each == shape.kv_heads % each == 0]
    stages = [each for each in powers(min(shape.layers, LONGEST_PIPELINE)) if shape.layers % each == 0]
    long_enough = wanted.batch.sequence_length >= LEAST_CONTEXT
    # each rank has two chunks of a row (head_tail.py)
    context = [each for each in CONTEXT_SIZES if wanted.batch.sequence_length % (2 * each) == 0] if long_enough else [1]
    described = [set(each.axes).intersection(AXIS_NAMES) for each in templates]
    for tp, pp, cp in product(tensor, stages, context):
        rest, remainder = divmod(gpus, tp * pp * cp)
        if remainder or rest > wanted.batch.global_batch_size:  # a rank needs a row
            continue
        for ep in sorted({1, _experts_per_group(shape.experts, rest)}):
            sharding = {"zero": 1 if pp > 1 else 3, "shard": rest, "sequence_parallel": tp > 1}
            layout = Layout(rest, tp, pp, cp, ep, schedule="1f1b" if pp > 1 else "", **sharding)
            used = set(filter(None, axes_of(layout).split("+")))
            if used and used not in described:
                yield layout, lack(used, described)


def axes_of(layout: Layout) -> str:
    """Name the axes beside data parallelism that a layout uses: `pp+tp`."""
    return "+".join(axis for axis in ("pp", "ep", "cp", "tp") if getattr(layout, axis) > 1)


def _experts_per_group(experts: int, ranks: int) -> int:
    """Ranks over which experts are spread: the most that divide both."""
    return max((each for each in powers(ranks) if experts and experts % each == 0 and ranks % each == 0), default=1)


def lack(used: set[str], described: Sequence[set[str]]) -> str:
    """Say what this version lacks for a shape that uses these axes."""
    known = set().union(*described)
    missing = used - known
    named = " and ".join(text for axis, text in AXIS_NAMES.items() if axis in (missing or used))
    return f"needs {named}{'' if missing else ' together'}, not in this version"
