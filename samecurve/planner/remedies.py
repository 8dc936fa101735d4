"""Changes that make a job fit: another setting, more GPUs, or shorter rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from samecurve.planner import plan_text, search, strategies
from samecurve.planner.answers import predict, predict_memory
from samecurve.planner.cluster import Cluster
from samecurve.planner.inputs import PlanRequest
from samecurve.planner.search import Choice, host_problem
from samecurve.planner.strategies import Template

MOST_GPUS = 4096
SHORTEST = 128  # tokens of a row that is worth proposing
WOULD = {"fits": "fit", "tight": "be tight"}


def smallest_change(
    request: PlanRequest, machines: Cluster, whole: Cluster, templates: Sequence[Template], shipped: Sequence[Template]
) -> str:
    """Say what would make a job fit: a setting that leaves the curve alone, the fewest GPUs, else shorter rows.

    Args:
        machines: those that nothing fits on.
        whole: the same with nodes of full size.
        templates: the strategies that were asked for.
        shipped: all that there are.
    """
    fixes = [_setting(request, machines, templates, shipped)]
    if not fixes[0] and request.attention == "auto":  # sdpa on a GPU, whose masks grow with the square of a row
        other = replace(request, attention="varlen")
        fixes = [_setting(other, machines, templates, shipped, ("model.attention=varlen",))]
    as_written = templates is not shipped  # files that were asked for are not searched
    if more := more_gpus(request, whole, templates, machines.gpus, as_written):
        fixes.append(f"{more.name} {elsewhere(more)}")
    if any(fixes):
        return ", or ".join(filter(None, fixes))
    # the longest rows that fit, else those that are tight, which make another curve
    tight, length = "", request.batch.sequence_length // 2
    while length >= SHORTEST:
        batch = request.batch.model_copy(update={"sequence_length": length})
        choice = smallest(replace(request, batch=batch), machines, shipped, as_written=False)
        if choice:
            would = f"batch.sequence_length={length} would {WOULD[choice.verdict]}"
            told = f"{would} with {choice.name}, and change what is trained"
            if choice.verdict == "fits":
                return told
            tight = tight or told
        length //= 2
    return tight or f"not even on {MOST_GPUS} GPUs or with shorter rows; train a smaller model or an adapter"


def rejected(choices: Sequence[Choice], request: PlanRequest, whole: Cluster, as_written: bool) -> list[str]:
    """Say in one line each why strategies are out of which no size fits or is tight, and what would help.

    Args:
        choices: of a search, ranked or not.
        request: what is fixed in it is so on other numbers of GPUs, too.
        as_written: whether only the files' own sizes count.
    """
    chosen = {choice.name for choice in choices if choice.prediction and choice.prediction.fits}
    lines = []
    for name in dict.fromkeys(choice.name for choice in choices if choice.name not in chosen):
        first, helps = next(choice for choice in choices if choice.name == name), "more GPUs do not help"
        if first.job and first.template:
            gpus = first.job.dims.world_size
            if more := more_gpus(request, whole, [first.template], gpus, as_written):
                helps = f"it {elsewhere(more)}"
        lines.append(plan_text.rejection(first, helps))
    return lines


def elsewhere(more: Choice) -> str:
    """Say on how many GPUs a choice fits, or is tight, and whether the batch is large enough for its ranks."""
    assert more.job
    rows = f", with batch.global_batch_size={more.job.dims.dp} for a row per rank, which changes what is trained"
    verdict = "fits" if more.verdict == "fits" else "is tight"
    return f"{verdict} on {more.job.dims.world_size} GPUs{rows if more.idle_ranks else ''}"


def more_gpus(
    request: PlanRequest, machines: Cluster, templates: Sequence[Template], more_than: int, as_written: bool = False
) -> Choice | None:
    """Find the fewest GPUs above `more_than` on which one of the strategies fits, or is tight where none fits on any.

    Numbers are 1, 1.25, 1.5 and 1.75 times powers of two, of GPUs up to a node and of whole nodes above. Those on which
    every rank gets a row come first.

    Args:
        machines: with nodes of full size.
        as_written: whether only the files' own sizes count.
    """
    node, best = machines.gpus_per_node, None
    counts = sorted({part * 2**power // 4 for part in (4, 5, 6, 7) for power in range(MOST_GPUS.bit_length())})
    counts = [*(count for count in counts if count < node), *(count * node for count in counts)]
    for gpus in counts:
        if more_than < gpus <= MOST_GPUS:
            choice = smallest(request, machines.scaled(gpus), templates, as_written)
            if choice and (not best or _merit(choice) > _merit(best)):
                best = choice
            if choice and _merit(choice) == (True, True):
                break
    return best


def _merit(choice: Choice) -> tuple[bool, bool]:
    return choice.verdict == "fits", not choice.idle_ranks


def smallest(request: PlanRequest, machines: Cluster, templates: Sequence[Template], as_written: bool) -> Choice | None:
    """Return the first strategy that fits with as little memory as a search may choose, else the first tight one."""
    tight = None
    for template in templates:
        for sizes in [template.own_sizes] if as_written else search.sizes(template, request, machines):
            for choice in _least_memory(request, machines, template, sizes):
                assert choice.job
                verdict = predict_memory(choice.job).verdict(choice.job)
                if verdict == "fits" and not choice.idle_ranks:
                    return replace(choice, prediction=predict(choice.job))
                if verdict != "too large" and not tight:
                    tight = replace(choice, prediction=predict(choice.job))
    return tight


def _least_memory(
    request: PlanRequest, machines: Cluster, template: Template, sizes: dict[str, int]
) -> Iterator[Choice]:
    """Generate choices of given sizes that can run, without predictions."""
    strategy, problems = strategies.describe(request, template, sizes, machines.gpus)
    if problems:
        return
    checkpointing = request.checkpointing if "checkpointing" in request.fixed else "full"
    counts = search.micro_batches(request, strategy.dims.dp)
    # under GPipe a larger one may need less (search.py)
    for micro_batch in counts if strategy.schedule == "GPipe" else counts[:1]:
        least = request.with_memory(micro_batch, checkpointing)
        job = strategies.job(least, strategy, machines) if strategies.takes(least, strategy) else None
        if job and not host_problem(job, machines):
            yield Choice(template.name, template, sizes, job=job, tokens=request.tokens)


def _setting(
    request: PlanRequest,
    machines: Cluster,
    templates: Sequence[Template],
    shipped: Sequence[Template],
    others: tuple[str, ...] = (),
) -> str:
    """Name the first strategy and settings that fit, else are tight. others: settings that `request` has already."""
    recompute, rows = "memory.activation_checkpointing=full", "batch.micro_batch_size=1"
    # One setting before two, the strategies that were asked for before others, files as they are before other sizes.
    changes = (
        ((recompute,), templates, {"micro_batch"}),
        ((rows,), templates, {"checkpointing"}),
        ((recompute, rows), templates, set()),
        ((), shipped, {"micro_batch", "checkpointing"}),
        ((recompute, rows), shipped, set()),
    )
    tight = ""
    for as_written in (True, False):
        for settings, tried, kept in changes:
            choice = smallest(replace(request, fixed=request.fixed & kept), machines, tried, as_written)
            if choice and choice.job and choice.template:
                resized = "" if as_written else f"with {plan_text.sizes(choice.job)}"
                words = " ".join(filter(None, ["--strategy", choice.template.path, resized, *settings, *others]))
                if choice.verdict == "fits":
                    return f"{words} would fit"
                tight = tight or f"{words} would be tight"
    return tight
