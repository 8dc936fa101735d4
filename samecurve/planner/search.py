"""Searches the ways to run a job and ranks them: strategies, their parallel sizes, micro-batches and recomputation.

What can run is what the files in configs/ describe, with other sizes of the axes that they set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from samecurve.planner import memory, step_time, strategies
from samecurve.planner.answers import MemoryPrediction, Prediction, predict_memory, prediction
from samecurve.planner.cluster import Cluster
from samecurve.planner.hardware import is_known
from samecurve.planner.inputs import PlanRequest
from samecurve.planner.job import Job
from samecurve.planner.strategies import Template, simplicity
from samecurve.strategy.plan import Strategy

LONGEST_PIPELINE = 64
CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
LEAST_CONTEXT = 8192  # tokens of a row from which splitting it is worth a look


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def powers(limit: int) -> list[int]:
    """List the powers of two up to a limit."""
    return [2**exponent for exponent in range(max(limit, 1).bit_length())]


def sizes(template: Template, request: PlanRequest, machines: Cluster) -> Iterator[dict[str, int]]:
    """Generate the sizes of a strategy file's axes to compare; which ones are legal is for its own check to say."""
    gpus, most = machines.gpus, request.shape.layers // template.stages_per_rank
    heads = request.shape.heads if template.by_heads else 0
    # For short rows one size of context parallelism, the file's own, is enough to compare.
    parts = CONTEXT_SIZES[1:] if request.batch.sequence_length >= LEAST_CONTEXT else ()
    choices = {
        "pp": [ranks for ranks in divisors(gpus) if 1 < ranks <= min(most, LONGEST_PIPELINE)],
        "dp_replicate": [ranks for ranks in divisors(gpus) if ranks in (*powers(gpus), machines.nodes) and ranks > 1],
        "cp": [ranks for ranks in parts if gpus % ranks == 0 and heads % ranks == 0],
        "tp": [ranks for ranks in divisors(gpus) if 1 < ranks <= machines.gpus_per_node],
        "ep": [
            ranks for ranks in divisors(math.gcd(gpus, request.shape.experts)) if 1 < ranks <= machines.gpus_per_node
        ],
        "hpz": [ranks for ranks in divisors(machines.gpus_per_node) if 1 < ranks < gpus],
        "tp_sequence": [False, True],
    }
    # Where a number of GPUs has no legal size, the file's own one lets its check say why.
    own = {axis: [size] if size else [] for axis, size in template.own_sizes.items()}
    for combination in product(*(choices[axis] or own[axis] for axis in own)):
        yield dict(zip(own, combination, strict=True))


def micro_batches(request: PlanRequest, ranks: int) -> list[int]:
    """List micro-batch sizes in ascending order, at most the rows of a rank."""
    if "micro_batch" in request.fixed:
        return [request.batch.micro_batch_size]
    most = request.rows_of_a_rank(ranks)
    sizes = {*powers(most), most, min(request.batch.micro_batch_size, most)}
    return sorted(filter(request.takes, sizes))


def checkpointings(request: PlanRequest) -> list[str]:
    """List the kinds of recomputation to compare, the fastest first."""
    if "checkpointing" in request.fixed:
        return [request.checkpointing]
    recipe = request.source.recipe
    # Liger rotates queries and keys in place, which selective recomputation keeps
    whole = recipe and (recipe.model.kernels == "liger" or recipe.memory.selective_save == "attention")
    selective = [] if whole else ["selective"]
    return list(dict.fromkeys(["none", request.checkpointing, *selective, "full"]))


# Of two public runs that differ in nothing but the shape, and whose predicted step times differ by this much, the one
# that is predicted to be faster was so in 8 of 10 cases.
COMPARED = 0.07  # logarithm (benchmarks/planner.md, "Which of two is faster")


@dataclass(frozen=True)
class Choice:
    """A way to run the job.

    Attributes:
        name: of the strategy.
        template: its files.
        sizes: of the axes that the files set.
        job, prediction: absent where `reason` says why it cannot run on these GPUs.
        invalid: whether that is wrong on any number of GPUs.
        tokens: of a step, over all ranks.
        tie: whether it is as fast as the fastest one, as far as can be predicted.
    """

    name: str
    template: Template | None = None
    sizes: dict[str, int] | None = None
    job: Job | None = None
    prediction: Prediction | None = None
    reason: str = ""
    invalid: bool = False
    tokens: int = 0
    tie: bool = False

    @property
    def tokens_per_s(self) -> float:
        assert self.prediction
        return self.tokens / self.prediction.seconds

    @property
    def tokens_per_s_interval(self) -> tuple[float, float]:
        assert self.prediction
        low, high = self.prediction.seconds_interval
        return self.tokens / high, self.tokens / low

    @property
    def uncertainty(self) -> float:
        """Ratio of the ends of the step time's interval, in whole thousandths."""
        assert self.prediction
        low, high = self.prediction.seconds_interval
        return round(high / low, 3)

    @property
    def verdict(self) -> str:
        """fits, tight or too large (see `MemoryPrediction.verdict`), or cannot run."""
        return self.prediction.verdict(self.job) if self.job and self.prediction else "cannot run"

    @property
    def idle_ranks(self) -> int:
        """Number of data-parallel ranks that get no row of a step."""
        assert self.job
        return max(0, self.job.dims.dp - round(self.tokens / (self.job.sequences * self.job.seq)))

    @property
    def order(self) -> tuple:
        """Return the sort key of ties: few moving parts, no recomputation, small groups, then memory headroom."""
        assert self.job and self.prediction
        dims = self.job.dims
        parts = sum(size > 1 for size in (dims.tp, dims.pp, dims.cp, dims.ep)) + self.job.strategy.tp_sequence_parallel
        recomputes, ranks = self.job.checkpointing != "none", dims.tp * dims.pp * dims.cp
        return simplicity(self.name), parts, recomputes, ranks, self.prediction.total_memory_gib


def evaluate(request: PlanRequest, machines: Cluster, templates: Sequence[Template]) -> list[Choice]:
    """Predict the strategies exactly as their files and the recipe say, in the order given."""
    exact = replace(request, fixed=frozenset(("micro_batch", "checkpointing")))
    return [sized(exact, machines, template, template.own_sizes) for template in templates]


def search(request: PlanRequest, machines: Cluster, templates: Sequence[Template]) -> list[Choice]:
    """Find the best micro-batch and recomputation of every strategy and size, and rank them.

    Of what a strategy's own check refuses, one choice with the reason remains.
    """
    kept: list[Choice] = []
    for template in templates:
        tried = [sized(request, machines, template, sizes) for sizes in sizes(template, request, machines)]
        runnable = [choice for choice in tried if choice.prediction]
        kept += runnable or tried[:1] or [Choice(template.name, template, reason="none of its sizes suits these GPUs")]
    return ranked(kept)


def sized(request: PlanRequest, machines: Cluster, template: Template, sizes: dict[str, int]) -> Choice:
    """Predict a strategy of given sizes with the best micro-batch and recomputation that the search may choose.

    Args:
        request: the job; `fixed` names what must stay.
        machines: the cluster, with the number of GPUs.

    Returns:
        The prediction, or a choice that only has the reason why the strategy cannot run.
    """
    strategy, problems = strategies.describe(request, template, sizes, machines.gpus)
    if problems:
        # lists of reasons begin with the strategy's name, which may be that of a block
        reason = "; ".join(
            problem.text if problem.key == template.name else f"{problem.key}: {problem.text}" for problem in problems
        )
        # a wrong topology may be right on another number of GPUs; other problems stay
        invalid = not all(problem.topology for problem in problems)
        return Choice(template.name, template, sizes, reason=reason, invalid=invalid)
    chosen = _best(request, strategy, machines)
    if chosen.job and (reason := host_problem(chosen.job, machines)):
        return Choice(template.name, template, sizes, reason=reason)
    return replace(chosen, name=template.name, template=template, sizes=sizes)


def host_problem(job: Job, machines: Cluster) -> str:
    """Say why a node's host memory does not hold what is offloaded to it; "" if it does."""
    needed = memory.offloaded_gib(job) if job.offloads else 0
    if needed <= machines.host.memory_gib:
        return ""
    return f"offloading needs {needed:,.0f} GiB of host memory per node, which has {machines.host.memory_gib:,.0f}"


def _best(request: PlanRequest, strategy: Strategy, machines: Cluster) -> Choice:
    """Predict all micro-batches and recomputations of a shape; return the fastest that fits, else the smallest."""
    # by micro-batch, with the least recomputation, which is the fastest
    fast: dict[int, tuple[Job, MemoryPrediction]] = {}
    tight: list[tuple[Job, MemoryPrediction]] = []
    large: list[tuple[Job, MemoryPrediction]] = []
    for checkpointing in checkpointings(request):
        for micro_batch in micro_batches(request, strategy.dims.dp):
            changed = request.with_memory(micro_batch, checkpointing)
            if micro_batch in fast or not strategies.takes(changed, strategy):
                continue
            job = strategies.job(changed, strategy, machines)
            memory_use = predict_memory(job)
            verdict = memory_use.verdict(job)
            if verdict == "fits":
                fast[micro_batch] = job, memory_use
            else:
                (tight if verdict == "tight" else large).append((job, memory_use))
            # a larger one needs more memory; not so under GPipe, whose micro-batches each keep a gradient of the head
            if verdict == "too large" and job.strategy.schedule != "GPipe":
                break
    if not (fast or tight or large):
        return Choice("", reason="its pipeline schedule takes none of these micro-batches, or not this recomputation")
    if fast or tight:
        timed = [(*trial, step_time.breakdown(trial[0]).total) for trial in fast.values() or tight]
        job, memory_use, seconds = min(timed, key=lambda trial: trial[2])
    else:
        job, memory_use = min(large, key=lambda trial: trial[1].total_memory_gib)
        seconds = step_time.breakdown(job).total
    return Choice("", job=job, prediction=prediction(job, memory_use, seconds), tokens=request.tokens)


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Sort: what fits, then what is tight, then what is too large, then what cannot run; the first two by speed.

    Of what fits, and of what is tight, choices in which some ranks get no row come last. Of choices that may be the
    fastest one, the simplest is first (see `Choice.order`), the answer; these, and all that are predicted to be faster
    than it, are ties.
    """
    choices = list(choices)
    result: list[Choice] = []
    for verdict, idle in product(("fits", "tight"), (False, True)):
        alike = [choice for choice in choices if choice.verdict == verdict and (choice.idle_ranks > 0) == idle]
        group = sorted(alike, key=lambda choice: -choice.tokens_per_s)
        first = sorted((choice for choice in group if _may_be_fastest(choice, group)), key=lambda choice: choice.order)
        others = [choice for choice in group if choice not in first]
        faster = [choice for choice in others if choice.tokens_per_s >= first[0].tokens_per_s]
        # what comes after a better group cannot be as good as the answer
        is_tie = len(first) + len(faster) > 1 and not result
        result += [replace(choice, tie=is_tie) for choice in [*first, *faster]]
        result += others[len(faster) :]
    large = [choice for choice in choices if choice.verdict == "too large"]
    result += sorted(large, key=lambda choice: choice.prediction.total_memory_gib if choice.prediction else 0)
    return result + [choice for choice in choices if choice.verdict == "cannot run"]


def _may_be_fastest(choice: Choice, group: Sequence[Choice]) -> bool:
    """Whether a choice may be the fastest of a group that is sorted by speed.

    None that is as certain may be faster by far: a wide interval is no advantage. And the choice has to reach the
    interval of the fastest one; not if this is as certain and of its own stack, because errors within one stack are
    alike, so that its ratios are known better than the times themselves.
    """
    fastest, limit = group[0], choice.tokens_per_s * math.exp(COMPARED)
    if any(other.tokens_per_s > limit and other.uncertainty <= choice.uncertainty for other in group):
        return False
    is_comparable = _stack(fastest) == _stack(choice) and fastest.uncertainty <= choice.uncertainty
    return is_comparable or choice.tokens_per_s >= fastest.tokens_per_s_interval[0]


def _stack(choice: Choice) -> str:
    """Name the stack whose constants the prediction took; those without constants of their own share the default's."""
    assert choice.job
    return choice.job.stack if is_known(choice.job.stack) else ""
