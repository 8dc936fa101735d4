"""The link that a group of a job's ranks communicates over."""

from __future__ import annotations

from samecurve.planner import links
from samecurve.planner.hardware import DEFAULT_NODE_GBIT, Link, link
from samecurve.planner.job import Job
from samecurve.planner.profiles import Profile


def axis_link(job: Job, axis: str, constants: Profile, ranks: int = 0) -> Link:
    """Find the link of the groups of one axis, or of `ranks` neighbours along it.

    Args:
        job: gives the layout and the machines.
        axis: name of a parallel size of the layout, for example "tp".
        constants: of the strategy's stack.
        ranks: number of neighbours; 0 for all ranks of the axis.
    """
    return group_link(job, ranks or getattr(job.layout, axis), job.layout.stride(axis), constants)


def group_link(job: Job, ranks: int, stride: int, constants: Profile) -> Link:
    """Find the link of a group of ranks at equal distances.

    Args:
        job: gives the machines.
        ranks: number of ranks in the group.
        stride: distance between neighbours of the group, in ranks.
        constants: of the strategy's stack.
    """
    if job.levels:
        step = constants.ring_step_us * 1e-6
        return links.link(job.levels, job.gpus_per_node, ranks, stride, constants.network_share, step)
    gbit = (job.node_gbit or DEFAULT_NODE_GBIT) * constants.network_share
    return link(job.card, job.gpus_per_node, gbit, ranks, stride, constants.ring_step_us * 1e-6)
