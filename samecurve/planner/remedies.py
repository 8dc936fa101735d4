"""Changes that make a job fit: another setting, more GPUs, or shorter rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from samecurve.planner import memory, plan_text, search, strategies
from samecurve.planner.answers import hold, predict
from samecurve.planner.cluster import Cluster
from samecurve.planner.inputs import Wanted
from samecurve.planner.search import Choice, Sizes, host_problem
from samecurve.planner.strategies import Template
from samecurve.specs.gpus import GIB

MOST_GPUS = 4096
SCANNED = 64  # numbers of GPUs that are tried one by one for the smallest
SHORTEST = 128  # tokens of a row that is worth proposing
GOOD = (("fits",), ("fits", "tight"))  # verdicts: the second where nothing has the first
WOULD = {"fits": "fit", "tight": "be tight"}

Judged = tuple[Choice, str]
"""A choice without predictions, and its verdict."""


def more_gpus(
    wanted: Wanted, machines: Cluster, templates: Sequence[Template], more_than: int, as_written: bool = False
) -> tuple[Choice, str] | None:
    """Find the fewest GPUs above `more_than` on which one of the strategies fits, if need be with more rows.

    Args:
        wanted, machines, templates, more_than, as_written: see `fewest_gpus`.

    Returns:
        The first choice that fits there, or is tight where none fits on any number with the same rows; and what else
        has to change, as `", with ..."`. None if there is neither.
    """
    hungry = []
    every = Tried(wanted, templates, as_written=as_written)
    for tried in [replace(every, good=verdicts) for verdicts in GOOD]:
        least = fewest_gpus(tried, machines, more_than)
        if not least:
            continue
        # Fewer GPUs than `least` never fit. Look for one where every rank has a row, first at `least`, then above.
        fed = replace(tried, fed=True)
        choice = fed.first(machines.scaled(least))
        if not choice and (gpus := fewest_gpus(fed, machines, least)):
            choice = fed.first(machines.scaled(gpus))
        if choice:
            return choice, ""
        choice = tried.first(machines.scaled(least))
        assert choice and choice.job  # `fewest_gpus` has found it
        rows = f"batch.global_batch_size={choice.job.dims.dp}"
        hungry.append((choice, f", with {rows} for a row per rank, which changes what is trained"))
    return next(iter(hungry), None)


def rejected(choices: Sequence[Choice], wanted: Wanted, whole: Cluster, as_written: bool) -> list[str]:
    """Say in one line each why strategies are out of which no size fits or is tight, and what would help.

    Args:
        choices: of a search, ranked or not.
        wanted: what is fixed in it is so on other numbers of GPUs, too.
        whole: the cluster.
        as_written: whether only the files' own sizes count.
    """
    chosen = {choice.name for choice in choices if choice.prediction and choice.prediction.fits}
    lines = []
    for name in dict.fromkeys(choice.name for choice in choices if choice.name not in chosen):
        first, more = next(choice for choice in choices if choice.name == name), None
        if first.job and first.template:
            more = more_gpus(wanted, whole, [first.template], first.job.dims.world_size, as_written)
        lines.append(plan_text.rejection(first, more))
    return lines


@dataclass(frozen=True)
class Tried:
    """Strategies that are tried for a job on different numbers of GPUs.

    Attributes:
        good: the verdicts that count, one of GOOD.
        as_written: whether only the files' own sizes count.
        fed: whether every rank has to get a row (`Choice.idle_ranks`).
        judged: by number of GPUs, choices with their verdicts, and those that are still to judge; for copies, too,
            which differ in what counts.
        hopeless: sizes whose tensors are too large for a GPU even among MOST_GPUS.
    """

    wanted: Wanted
    templates: Sequence[Template]
    good: tuple[str, ...] = ("fits",)
    as_written: bool = False
    fed: bool = False
    judged: dict[int, tuple[list[Judged], Iterator[Judged]]] = field(default_factory=dict)
    hopeless: dict[tuple, bool] = field(default_factory=dict)

    def first(self, machines: Cluster) -> Choice | None:
        """Return the first strategy with a good verdict, with its sizes."""
        for choice, verdict in self._verdicts(machines):
            if verdict in self.good and not (self.fed and choice.idle_ranks):
                assert choice.job
                return replace(choice, prediction=predict(choice.job))
        return None

    def _verdicts(self, machines: Cluster) -> Iterator[Judged]:
        known, left = self.judged.setdefault(machines.gpus, ([], self._judge(machines)))
        yield from known
        for judged in left:
            known.append(judged)
            yield judged

    def _judge(self, machines: Cluster) -> Iterator[Judged]:
        for template in self.templates:
            own = [template.own_sizes] if self.as_written else search.sizes(template, self.wanted, machines)
            for sizes in own:
                if self._is_hopeless(machines, template, sizes):
                    continue
                for choice in _smallest(self.wanted, machines, template, sizes):
                    assert choice.job
                    yield choice, hold(choice.job).verdict(choice.job.memory_gib)

    def _is_hopeless(self, machines: Cluster, template: Template, sizes: Sizes) -> bool:
        """Whether tensors of such sizes are too large among all GPUs: more of them share states, and nothing else.

        Sizes that do not divide MOST_GPUS are tried once or twice, and not worth a look.
        """
        key = template, *sizes.items()
        if key not in self.hopeless and MOST_GPUS % machines.gpus:
            return False
        if key not in self.hopeless:
            most = machines.scaled(MOST_GPUS)
            jobs = [choice.job for choice in _smallest(self.wanted, most, template, sizes) if choice.job]
            peaks = [max(rank_class.peak for rank_class in memory.anatomy(job)) / GIB > job.memory_gib for job in jobs]
            self.hopeless[key] = bool(peaks) and all(peaks)
        return self.hopeless[key]


def fewest_gpus(tried: Tried, machines: Cluster, more_than: int) -> int | None:
    """Find the smallest number of GPUs above `more_than` on which one of the strategies fits, up to MOST_GPUS.

    Args:
        tried: the strategies, and what counts.
        machines: with nodes of full size; a part of one node counts, too.
    """
    node = machines.gpus_per_node
    counts = [*range(1, node), *range(node, MOST_GPUS + 1, node)]
    counts = [count for count in counts if count > more_than]

    def fit(gpus: int) -> bool:
        return tried.first(machines.scaled(gpus)) is not None

    # No number up to counts[low - 1] is known to fit. Only numbers are tried that parallel sizes divide.
    low, high = 0, 0
    for high in [index for index, count in enumerate(counts, start=1) if _is_round(count, node) or count == counts[-1]]:
        if fit(counts[high - 1]):
            break
        low = high
    if low == high:
        return None
    while high - low > SCANNED:
        middle = (low + high) // 2
        # many numbers fail only because parallel sizes do not divide them, which would mislead the bisection
        near = range(middle, max(low, middle - 8), -1)
        middle = next((place for place in near if counts[place - 1] % 8 == 0), middle)
        low, high = (low, middle) if fit(counts[middle - 1]) else (middle, high)
    return next(count for count in counts[low:high] if fit(count))


def _is_round(gpus: int, node: int) -> bool:
    """Whether GPUs, or whole nodes of them, are a power of two."""
    nodes = gpus // node if gpus % node == 0 else gpus
    return nodes & (nodes - 1) == 0


def _smallest(wanted: Wanted, machines: Cluster, template: Template, sizes: Sizes) -> Iterator[Choice]:
    """Describe sizes of a strategy with as little memory as the search may choose.

    Generates choices that can run, without predictions.
    """
    strategy, problems = strategies.describe(wanted, template, sizes, machines.gpus)
    if problems:
        return
    checkpointing = wanted.checkpointing if "checkpointing" in wanted.fixed else "full"
    tokens = wanted.batch.global_batch_size * wanted.batch.sequence_length
    counts = search.micro_batches(wanted, strategy.dims.dp)
    # under GPipe a larger one may need less (search.py)
    for micro_batch in counts if strategy.schedule == "GPipe" else counts[:1]:
        least = wanted.with_memory(micro_batch, checkpointing)
        job = strategies.job(least, strategy, machines) if strategies.takes(least, strategy) else None
        if job and not host_problem(job, machines):
            yield Choice(template.name, template, sizes, job=job, tokens=tokens)


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
    fixes = [_setting(wanted, machines, templates, shipped)]
    if not fixes[0] and wanted.attention == "auto":  # sdpa on a GPU, whose masks grow with the square of a row's length
        other = replace(wanted, attention="varlen")
        fixes = [_setting(other, machines, templates, shipped, ("model.attention=varlen",))]
    more = more_gpus(wanted, whole, templates, machines.gpus, as_written)
    if more:
        fixes.append(f"{more[0].name} {plan_text.elsewhere(more)}")
    return ", or ".join(filter(None, fixes)) or _shorter(wanted, machines, shipped)


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
    failed = set()  # of a job with nothing fixed, all changes are the same
    for good, as_written, (settings, tried, kept) in product(GOOD, (True, False), changes):
        fixed = wanted.fixed & kept
        key = good, as_written, tried is shipped, fixed
        if key in failed:
            continue
        choice = Tried(replace(wanted, fixed=fixed), tried, good, as_written).first(machines)
        if choice and choice.job and choice.template:
            resized = "" if as_written else f"with {plan_text.sizes(choice.job)}"
            named = filter(None, ["--strategy", choice.template.path, resized, *settings, *others])
            return f"{' '.join(named)} would {WOULD[choice.verdict]}"
        failed.add(key)
    return ""


def _shorter(wanted: Wanted, machines: Cluster, templates: Sequence[Template]) -> str:
    """Name the longest rows that fit, which make another curve."""
    for good in GOOD:
        length = wanted.batch.sequence_length // 2
        while length >= SHORTEST:
            batch = wanted.batch.model_copy(update={"sequence_length": length})
            choice = Tried(replace(wanted, batch=batch), templates, good).first(machines)
            if choice:
                would = f"batch.sequence_length={length} would {WOULD[choice.verdict]}"
                return f"{would} with {choice.name}, and change what is trained"
            length //= 2
    return f"not even on {MOST_GPUS} GPUs or with shorter rows; train a smaller model or an adapter"
