"""Changes that make a job fit: another setting, more GPUs, or shorter rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from samecurve.planner import plan_text, space
from samecurve.planner.cluster import Cluster
from samecurve.planner.search import Choice, sized
from samecurve.planner.strategy_files import Template
from samecurve.planner.wanted import Wanted

MOST_GPUS = 4096
SCANNED = 64  # numbers of GPUs that are tried one by one for the smallest
SHORTEST = 128  # tokens of a row that is worth proposing


def more_gpus(
    wanted: Wanted, machines: Cluster, templates: Sequence[Template], more_than: int, as_written: bool = False
) -> tuple[Choice, str] | None:
    """Find the fewest GPUs above `more_than` on which one of the strategies fits, if need be with more rows.

    Args:
        wanted, machines, templates, more_than, as_written: see `fewest_gpus`.

    Returns:
        The first choice that fits there, and what else has to change, as `", with ..."`; None if nothing fits.
    """
    arguments = wanted, machines, templates
    least = fewest_gpus(*arguments, more_than, as_written)
    if not least:
        return None
    # Fewer GPUs than `least` never fit. Look for one where every rank has a row, first at `least`, then above.
    choice = _first_fitting(wanted, machines.scaled(least), templates, as_written, fed=True)
    if not choice and (gpus := fewest_gpus(*arguments, least, as_written, fed=True)):
        choice = _first_fitting(wanted, machines.scaled(gpus), templates, as_written, fed=True)
    if choice:
        return choice, ""
    choice = _first_fitting(wanted, machines.scaled(least), templates, as_written)
    assert choice and choice.job  # `fewest_gpus` has found it
    return (
        choice,
        f", with batch.global_batch_size={choice.job.layout.dp} for a row per rank, which changes what is trained",
    )


def fewest_gpus(
    wanted: Wanted,
    machines: Cluster,
    templates: Sequence[Template],
    more_than: int,
    as_written: bool = False,
    fed: bool = False,
) -> int | None:
    """Find the smallest number of GPUs above `more_than` on which one of the strategies fits, up to MOST_GPUS.

    Args:
        machines: with nodes of full size; a part of one node counts, too.
        as_written: whether only the files' own sizes count.
        fed: whether every rank has to get a row (`Choice.idle_ranks`).
    """
    node = machines.gpus_per_node
    counts = [*range(1, node), *range(node, MOST_GPUS + 1, node)]
    counts = [each for each in counts if each > more_than]

    def fit(gpus: int) -> bool:
        return _first_fitting(wanted, machines.scaled(gpus), templates, as_written, fed) is not None

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


def _smallest(wanted: Wanted, machines: Cluster, template: Template, as_written: bool) -> Iterable[Choice]:
    """Predict the sizes of a strategy, or its file's own, with as little memory as the search may choose."""
    least = replace(wanted, fixed=frozenset(("micro_batch", "checkpointing")))
    if "micro_batch" not in wanted.fixed:
        least = least.with_memory(1, least.checkpointing)
    if "checkpointing" not in wanted.fixed:
        least = least.with_memory(least.batch.micro_batch_size, "full")
    own = template.own_sizes
    for sizes in [own] if as_written else space.sizes(template, wanted, machines):
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
    as_written = templates is not shipped  # files that were asked for are not searched
    found = [_setting(wanted, machines, templates, shipped)]
    if not found[0] and wanted.attention == "auto":  # sdpa on a GPU, whose masks grow with the square of a row's length
        other = replace(wanted, attention="varlen")
        found = [_setting(other, machines, templates, shipped, ("model.attention=varlen",))]
    more = more_gpus(wanted, whole, templates, machines.gpus, as_written)
    if more and (choice := more[0]).job:
        found.append(f"{choice.name} fits on {choice.job.layout.gpus} GPUs{more[1]}")
    return ", or ".join(filter(None, found)) or _shorter(wanted, machines, shipped)


def _first_fitting(
    wanted: Wanted, machines: Cluster, templates: Iterable[Template], as_written: bool = False, fed: bool = False
) -> Choice | None:
    """Return the first strategy that fits, with sizes; fed: with a row for every rank."""
    found = (each for template in templates for each in _smallest(wanted, machines, template, as_written))
    return next((each for each in found if each.found and each.found.fits and not (fed and each.idle_ranks)), None)


def _setting(
    wanted: Wanted,
    machines: Cluster,
    templates: Sequence[Template],
    shipped: Sequence[Template],
    others: tuple[str, ...] = (),
) -> str:
    """Name the first strategy and settings that fit. others: settings that `wanted` has already."""
    recompute, rows = "memory.activation_checkpointing=full", "batch.micro_batch_size=1"
    # One setting before two, the strategies that were asked for before others, files as they are before other sizes.
    changes = (
        ((recompute,), templates, {"micro_batch"}),
        ((rows,), templates, {"checkpointing"}),
        ((recompute, rows), templates, set()),
        ((), shipped, {"micro_batch", "checkpointing"}),
        ((recompute, rows), shipped, set()),
    )
    for as_written in (True, False):
        for settings, tried, kept in changes:
            choice = _first_fitting(replace(wanted, fixed=wanted.fixed & kept), machines, tried, as_written)
            if choice and choice.job and choice.template:
                resized = "" if as_written else f"with {plan_text.sizes(choice.job.layout)}"
                named = filter(None, ["--strategy", choice.template.path, resized, *settings, *others])
                return f"{' '.join(named)} would fit"
    return ""


def _shorter(wanted: Wanted, machines: Cluster, templates: Sequence[Template]) -> str:
    """Name the longest rows that fit, which make another curve."""
    length = wanted.batch.sequence_length // 2
    while length >= SHORTEST:
        batch = wanted.batch.model_copy(update={"sequence_length": length})
        choice = _first_fitting(replace(wanted, batch=batch), machines, templates)
        if choice:
            return f"batch.sequence_length={length} would fit with {choice.name}, and change what is trained"
        length //= 2
    return f"not even on {MOST_GPUS} GPUs or with shorter rows; train a smaller model or an adapter"
