"""Number of times that DeepSpeed's ZeRO-3 gathers each weight in a micro-batch."""

from __future__ import annotations

import math

from samecurve.planner.job import Job


def elements(job: Job) -> tuple[int, int, int]:
    """Count the elements of small weights, of large ones, and of the latter's gathers in a micro-batch.

    Each size is padded to a multiple of the ranks. Small weights stay whole on every rank. A large one is gathered for
    its forward pass, and again for the backward pass unless it stayed: it does if the weights that are used in between
    have fewer elements than `stage3_max_reuse_distance`, or if the whole model is gathered ahead.
    """
    shape, ranks, distance = job.shape, job.layout.shard, job.sharding.reuse_distance
    if shape.parameters <= job.sharding.prefetched:
        distance = math.inf
    passes = 3 if job.repeats_layers else 2  # that later weights make between the two uses
    sizes = [math.prod(each) for each in shape.weights]
    small = large = gathered = 0
    following = sum(sizes) + (shape.head_parameters if shape.tied else 0)
    for index, size in enumerate(sizes):  # in their order of use
        following -= size
        padded = -(-size // ranks) * ranks
        if size <= job.sharding.persistent:
            small += padded
            continue
        large += padded
        if index == 0 and shape.tied:  # embedding, head, and both again; the head's two uses follow one another
            between = following - shape.head_parameters
            times = 1 if between < distance else 3 if distance else 4
        else:
            times = 1 if passes * following < distance else 2
        gathered += times * padded
    return small, large, gathered
