"""States kept outside of a GPU: their bytes in host memory or on a disk, and the seconds to move them.

The transfers are not hidden behind computation, and the host's cores share the update of all GPUs of a node. None of it
is measured yet, so that the interval of a job that offloads is wider.
"""

from __future__ import annotations

from samecurve.planner.hardware import GIB
from samecurve.planner.job import Job

UPDATE_BYTES = 40  # of fp32 master weight, gradient and moments that Adam reads and writes per parameter
CORE_GB_PER_S = 2  # host memory traffic of one core in the update, assumed
KEPT = {"optimizer": 16, "param": 2}  # bytes per parameter: fp32 weight, gradient and moments; 16-bit weights


def kept(job: Job, device: str) -> float:
    """Return the GiB that a node keeps in host memory ("cpu") or on its disk ("nvme")."""
    parts = sum(size for part, size in KEPT.items() if f"{part}:{device}" in job.offload)
    replicas = max(job.layout.dp // max(job.layout.shard, 1), 1)
    whole = parts * job.shape.parameters * replicas
    return whole / GIB / max(job.layout.gpus / job.gpus_per_node, 1)


def seconds(job: Job, shard: float) -> float:
    """Return the seconds of one step's transfers and updates.

    Args:
        shard: parameters whose optimizer states belong to the rank.
    """
    if not job.offload:
        return 0
    lanes = job.host.pcie_gb_per_s * 1e9
    disk = job.host.nvme_gb_per_s * 1e9 / job.gpus_per_node
    total = 0.0
    if any(each.startswith("optimizer:") for each in job.offload):
        total += 2 * job.states.gradients * shard / lanes  # gradients out, weights in
        total += UPDATE_BYTES * shard * job.gpus_per_node / (CORE_GB_PER_S * 1e9 * job.host.cpu_cores)
    if "optimizer:nvme" in job.offload:
        total += 2 * 12 * shard / disk  # master weight and moments, read and written
    if any(each.startswith("param:") for each in job.offload):
        rate = disk if "param:nvme" in job.offload else lanes
        total += 2 * job.grad_accum * 2 * shard / rate  # a rank's part of the weights, for forward and backward
    return total
