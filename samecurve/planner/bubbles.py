"""Idle share of pipelines. p stages, m micro-batches, v model chunks per rank.

The formulas assume stages of equal time and free communication. For a 1.5B model on 8 stages, published idle shares of
1F1B are 24.3, 19.9 and 12.4 % with 24, 32 and 64 micro-batches (arXiv:2401.10241, table 4); the formula gives 22.6,
17.9 and 9.9 %, that is, 1.7, 2.0 and 2.5 points too few.
"""

from __future__ import annotations

ZERO_BUBBLE_SHARE = {"zb-1p": 1 / 3, "zb-2p": 0.0}  # of 1F1B's idle slots (arXiv:2401.10241)


def idle_slots(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle time of a rank in units of one micro-batch's forward and backward of its whole stage.

    Those of PyTorch's schedules are what timetables.py finds for their order of work.

    Args:
        schedule: a key of pipeline_schedules.SCHEDULES or ZERO_BUBBLE_SHARE, or "gpipe", "1f1b" or "interleaved".
        stages: number of ranks along the pipeline (p).
        micro_batches: of a step, per data-parallel rank (m).
        chunks: stages of each rank (v), for interleaved schedules.
    """
    waits = stages - 1
    if schedule in ZERO_BUBBLE_SHARE:
        return waits * ZERO_BUBBLE_SHARE[schedule]
    if schedule == "Interleaved1F1B":
        # with fewer micro-batches than ranks, a rank also waits for the first one to reach its next stage
        return (waits + max(0, stages - micro_batches)) / chunks
    if schedule == "ZBVZeroBubble":  # of six units, F, I and W of two stages
        return max(waits, 4 * waits - 2 * (micro_batches - 1)) / 6
    if schedule == "DualPipeV":  # PyTorch runs a forward pass and the backward pass beside it one after the other
        return 2 * waits / 6
    return waits / (chunks if schedule == "interleaved" else 1)


def bubble(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle share of a step: (p - 1) / (v m + p - 1) for GPipe, 1F1B (v = 1) and interleaved.

    Args:
        schedule, stages, micro_batches, chunks: see `idle_slots`.
    """
    idle = idle_slots(schedule, stages, micro_batches, chunks)
    return idle / (micro_batches + idle)
