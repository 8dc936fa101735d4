"""What PyTorch's pipeline schedules hold beside states and activations (torch 2.13).

Counted by torch's MemTracker in a schedule of one rank (bench/fake_pipeline.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from samecurve.planner.job import Job
from samecurve.planner.stages import Stage, in_flight, stage_parameters
from samecurve.strategy.pipeline_schedules import SCHEDULES
from samecurve.strategy.timetables import order


def is_scheduled(job: Job) -> bool:
    """Whether the job runs one of PyTorch's pipeline schedules."""
    return job.layout.schedule in SCHEDULES and job.layout.pp > 1


def outputs(job: Job, stage: Stage) -> float:
    """Count the bytes that a micro-batch's outputs of a rank's stages keep until its backward pass, in fp32."""
    schedule, ranks = SCHEDULES[job.layout.schedule], job.layout.pp
    sends = [each for each in schedule.stages(stage.index, ranks) if each + 1 < schedule.num_stages(ranks)]
    return 4 * job.tokens * job.shape.hidden * len(sends)


def kept_until_next_step(job: Job, stage: Stage) -> tuple[float, float, float]:
    """Count what a rank keeps of each micro-batch, always in fp32.

    Stages have buffers for what comes from their neighbours, also from one on the same rank. A backward pass in halves
    leaves the gradients of a stage's inputs. One that is passed on within the rank is in a buffer already.

    Returns:
        Bytes of the buffers; of the inputs' gradients in the backward pass, while other micro-batches keep their
        activations; of these gradients after it.
    """
    schedule, ranks, count = SCHEDULES[job.layout.schedule], job.layout.pp, job.grad_accum
    own, hidden = schedule.stages(stage.index, ranks), 4 * job.tokens * job.shape.hidden
    neighbours = [each + side for each in own for side in (-1, 1) if 0 <= each + side < schedule.num_stages(ranks)]
    cut = _cut_micro_batches(job.layout.schedule, stage.index, ranks, count) if schedule.folded else ()
    before = count - in_flight(job, stage)[0]
    arrived = [each for each in cut if each < before]
    return len(neighbours) * count * hidden, len(arrived) * hidden, len(cut) * hidden


@lru_cache(maxsize=512)
def _cut_micro_batches(schedule: str, rank: int, ranks: int, count: int) -> tuple[int, ...]:
    """List the micro-batches that leave the gradient of an input that another rank sent."""
    own = SCHEDULES[schedule].stages(rank, ranks)
    passes = (work for entry in order(schedule, rank, ranks, count) for work in entry if work.kind == "I")
    return tuple(work.micro_batch for work in passes if work.stage and work.stage - 1 not in own)


def cast_weights(job: Job, stage: Stage, count: float) -> tuple[float, float]:
    """Count the bytes of 16-bit copies of weights after the forward and in the backward pass, under autocast.

    Each micro-batch casts the layers' weights for itself, because its pass of a stage enters autocast anew.

    Args:
        count: micro-batches whose activations are kept.
    """
    of_layers = replace(stage, embedding=False, head=False)
    layers = 2 * sum(stage_parameters(job, of_layers))
    head = 2 * job.shape.head_parameters / job.layout.tp if stage.head else 0
    if job.repeats_layers:
        return layers + head, 2 * sum(stage_parameters(job, replace(of_layers, layers=1)))
    return layers * count + head, layers * count
