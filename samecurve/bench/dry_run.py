"""Second opinion on the memory of a plan: the real model under the real strategy, on fake tensors of one of N ranks.

Layers are alike, so that ranks with 2 and 4 layers are tracked and the others extrapolated.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from samecurve.bench.fake_rank import Tracked, track
from samecurve.errors import ConfigurationError
from samecurve.planner import memory
from samecurve.planner.job import Job
from samecurve.planner.memory import Anatomy
from samecurve.planner.plan_text import aligned
from samecurve.planner.stages import in_flight, stages
from samecurve.specs.gpus import GIB
from samecurve.strategy.plan import Plan
from samecurve.strategy.timetables import SCHEDULES, micro_batch_rule

DEPTHS = (2, 4)
MOST_MICRO_BATCHES = 16  # of a pipeline, each of which takes about a second
SHOWN = 0.05  # differences above this share are pointed out
STATES = ("weights", "gradients", "accumulators", "master weights", "optimizer")


def run(plan: Plan, job: Job, rank: int | None = None) -> int:
    """Track one rank of a plan, or one of each class of ranks, and print its memory beside that of the formulas.

    Args:
        plan: with the micro-batch size and recomputation of `job`.
        job: of the formulas.
        rank: of the fake world; None: of a pipeline the first rank of each class, and else rank 0.

    Raises:
        ConfigurationError: the strategy's engine cannot run on fake tensors.
    """
    strategy = plan.strategy
    if strategy.backend == "deepspeed":
        raise ConfigurationError(f"--dry_run: DeepSpeed ({strategy.name}) has buffers that the tracker cannot see")
    if job.teacher:
        raise ConfigurationError(f"--dry_run: task {plan.recipe.task} has a teacher, which only the formulas count")
    warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)  # of HSDP's mesh (torch 2.13)
    asked = job.grad_accum
    job = replace(job, grad_accum=_micro_batches(job))
    for anatomy, nth in _ranks(plan, job, rank):
        began = time.perf_counter()
        title = f"dry run: rank {nth} of {job.dims.world_size:,}, {' and '.join(map(str, DEPTHS))}"
        title += f" of {round(anatomy.stage.layers)} layers"
        if job.dims.pp > 1:
            count = f"{job.grad_accum} of {asked}" if job.grad_accum < asked else f"{asked}"
            title += f", {anatomy.stage.name} stage, {count} micro-batches"
        print(f"\n{title}", flush=True)
        try:
            few, more = (track(plan, job, nth, depth) for depth in DEPTHS)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            text = f"{strategy.name} needs the values of tensors ({error.func}), which fake ones do not have"
            raise ConfigurationError(f"--dry_run: {text}") from None
        print(_compare(job, anatomy, few, more))
        print(f"{time.perf_counter() - began:.0f} s")
    if strategy.keeps_model and strategy.distributed:
        print("Tracked as one process, without DDP, whose gradients are views of its buckets.")
    return 0


def _micro_batches(job: Job) -> int:
    """Choose how many micro-batches of a pipeline's step are tracked: the fewest that keep as many as the whole step.

    GPipe keeps them all, and is tracked with at most MOST_MICRO_BATCHES.
    """
    count, name, ranks = job.grad_accum, job.strategy.schedule, job.dims.pp
    if name not in SCHEDULES or ranks == 1:
        return count
    allowed = [number for number in range(1, count + 1) if not micro_batch_rule(name, number, ranks)]

    def kept(micro_batches: int) -> list[tuple[float, bool]]:
        some = replace(job, grad_accum=micro_batches)
        counts = [in_flight(some, stage)[0] for stage in stages(some, by_cost=False)]
        return [(number, number >= micro_batches) for number in counts]

    fewest = next(number for number in allowed if kept(number) == kept(count))
    return min(fewest, max((number for number in allowed if number <= MOST_MICRO_BATCHES), default=fewest))


def _ranks(plan: Plan, job: Job, rank: int | None) -> list[tuple[Anatomy, int]]:
    """List what is tracked: a rank of each class, or `rank`, behind the formulas' memory of it."""
    job = replace(job, card=replace(job.card, generation="cpu"))  # where it is tracked, and the loss has smaller chunks
    dims, all_stages = plan.strategy.dims, stages(job, by_cost=False)
    if dims.pp == 1:
        return [(memory.anatomy(job)[0], rank or 0)]
    if rank is None:
        ranks_of_stage = dims.world_size // dims.pp
        return [(memory.anatomy(job, chosen=[stage])[0], stage.index * ranks_of_stage) for stage in all_stages]
    place, schedule = dims.place(rank)["pp"], SCHEDULES[job.strategy.schedule]
    layers, own = schedule.layers(job.shape.layers, dims.pp), schedule.stages(place, dims.pp)
    has_first, has_last = 0 in own, schedule.num_stages(dims.pp) - 1 in own
    like = next(stage for stage in all_stages if (stage.embedding, stage.head) == (has_first, has_last))
    stage = replace(like, index=place, layers=sum(layers[layer] for layer in own), ranks=1)
    return [(memory.anatomy(job, chosen=[stage])[0], rank)]


def _compare(job: Job, anatomy: Anatomy, few: Tracked, more: Tracked) -> str:
    layers, lines = anatomy.stage.layers, {line.name: line for line in anatomy.lines}
    held = sum(lines[name].optimizer for name in STATES)
    of_layer = (lines["activations"].forward + lines["gathered inputs"].forward) / layers
    copies = lines["16-bit weights"]  # the tracker counts those of the layer's weights, too
    if job.dims.pp == 1:
        of_layer += copies.forward * job.shape.layer_parameters / job.shape.parameters
    elif not job.repeats_layers:
        of_layer += copies.backward / layers

    def whole(name: str) -> float:
        start, end = getattr(few, name), getattr(more, name)
        return start + (layers - DEPTHS[0]) * (end - start) / (DEPTHS[1] - DEPTHS[0])

    values = {
        "weights, gradients, optimizer": (held, whole("states")),
        "activations of a layer": (of_layer, (more.activations - few.activations) / (DEPTHS[1] - DEPTHS[0])),
        "peak of all tensors": (anatomy.peak - lines["workspaces"].forward, whole("peak")),  # a CPU has no cuBLAS
    }
    rows = [("GiB", "formulas", "tracked", "")]
    for name, (predicted, tracked) in values.items():
        error = predicted / tracked - 1 if tracked > 0 else 0.0
        note = f"differs by {error:+.0%}" if abs(error) > SHOWN else ""
        rows.append((name, f"{predicted / GIB:.3f}", f"{tracked / GIB:.3f}", note))
    return aligned(rows)
