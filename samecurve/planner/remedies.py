"""Changes that make a job fit: another setting, more GPUs, or shorter rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from samecurve.planner import space, strategies
from samecurve.planner.cluster import Cluster
from samecurve.planner.search import Choice, sized
from samecurve.planner.strategies import Wanted
from samecurve.planner.strategy_files import Template

MOST_GPUS = 4096
SCANNED = 64  # numbers of GPUs that are tried one by one for the smallest
SHORTEST = 128  # tokens of a row that is worth proposing


def fewest_gpus(wanted: Wanted, machines: Cluster, templates: Sequence[Template], more_than: int) -> int | None:
    """Find the smallest number of GPUs above `more_than` on which one of the strategies fits, up to MOST_GPUS.

    Args:
        machines: with nodes of full size; a part of one node counts, too.
    """
    node = machines.gpus_per_node
    counts = [*range(1, node), *range(node, MOST_GPUS + 1, node)]
    counts = [each for each in counts if each > more_than]

    def fit(gpus: int) -> bool:
        return any(
            choice.found and choice.found.fits
            for template in templates
            for choice in _smallest(wanted, machines.scaled(gpus), template)
        )

    # No number up to counts[low - 1] is known to fit. Only numbers are tried that parallel sizes divide.
    low, high = 0, 0
    for high in [index for index, each in enumerate(counts, start=1) if _is_round(each, node) or each == counts[-1]]:
        if fit(counts[high - 1]):
            break
        low = high
    if low == high:
        return None
    while high - low > SCANNED:
        middle = (low + high) // 2
        # many numbers fail only because parallel sizes do not divide them, which would mislead the bisection
        near = range(middle, max(low, middle - 8), -1)
        middle = next((each for each in near if counts[each - 1] % 8 == 0), middle)
        low, high = (low, middle) if fit(counts[middle - 1]) else (middle, high)
    return next(each for each in counts[low:high] if fit(each))


def _is_round(gpus: int, node: int) -> bool:
    """Whether GPUs, or whole nodes of them, are a power of two."""
    nodes = gpus // node if gpus % node == 0 else gpus
    return nodes & (nodes - 1) == 0


def _smallest(wanted: Wanted, machines: Cluster, template: Template) -> Iterable[Choice]:
    """Predict every size of a strategy with as little memory as the search may choose."""
    least = replace(wanted, fixed=frozenset(("micro_batch", "checkpointing")))
    if "micro_batch" not in wanted.fixed:
        least = strategies.with_memory(least, 1, least.checkpointing)
    if "checkpointing" not in wanted.fixed:
        least = strategies.with_memory(least, least.batch.micro_batch_size, "full")
    for sizes in space.sizes(template, wanted, machines):
        yield sized(least, machines, template, sizes)


def smallest_change(
    wanted: Wanted, machines: Cluster, whole: Cluster, templates: Sequence[Template], shipped: Sequence[Template]
) -> str:
    """Say what would make a job fit: a setting that leaves the curve alone, the fewest GPUs, else shorter rows.

    Args:
        machines: those that nothing fits on.
        whole: the same with nodes of full size.
        templates: the strategies that were asked for.
        shipped: all that there are.
    """
    found = [_setting(wanted, machines, templates, shipped)]
    gpus = fewest_gpus(wanted, whole, templates, machines.gpus)
    if gpus:
        found.append(f"{_first_fitting(wanted, whole.scaled(gpus), templates)} fits on {gpus} GPUs")
    return ", or ".join(filter(None, found)) or _shorter(wanted, machines, shipped)


def _first_fitting(wanted: Wanted, machines: Cluster, templates: Iterable[Template]) -> str:
    """Return the name of the first strategy that fits, or ""."""
    found = (each for template in templates for each in _smallest(wanted, machines, template))
    return next((each.name for each in found if each.found and each.found.fits), "")


def _setting(wanted: Wanted, machines: Cluster, templates: Sequence[Template], shipped: Sequence[Template]) -> str:
    recompute, rows = "memory.activation_checkpointing=full", "batch.micro_batch_size=1"
    # One setting before two, and the strategies that were asked for before others.
    changes = (
        ((recompute,), templates, {"micro_batch"}),
        ((rows,), templates, {"checkpointing"}),
        ((recompute, rows), templates, set()),
        ((), shipped, {"micro_batch", "checkpointing"}),
        ((recompute, rows), shipped, set()),
    )
    for settings, tried, kept in changes:
        name = _first_fitting(replace(wanted, fixed=wanted.fixed & kept), machines, tried)
        if name:
            return f"{' '.join(['--strategy', f'configs/{name}.yaml', *settings])} would fit"
    return ""


def _shorter(wanted: Wanted, machines: Cluster, templates: Sequence[Template]) -> str:
    """Name the longest rows that fit, which make another curve."""
    length = wanted.batch.sequence_length // 2
    while length >= SHORTEST:
        batch = wanted.batch.model_copy(update={"sequence_length": length})
        name = _first_fitting(replace(wanted, batch=batch), machines, templates)
        if name:
            return f"batch.sequence_length={length} would fit with {name}, and change what is trained"
        length //= 2
    return f"not even on {MOST_GPUS} GPUs or with shorter rows; train a smaller model or an adapter"
