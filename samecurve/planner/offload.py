"""States kept outside of a GPU: their bytes in host memory or on a disk, and the seconds to move them.

The bytes are those of runs on a CPU (test_tensor_bytes.py). The transfers are not hidden behind computation, and the
host's cores share the update of all GPUs of a node; no time is measured yet, so that intervals are wider.
"""

from __future__ import annotations

import math

from samecurve.planner.hardware import ASSUMED, Constant
from samecurve.planner.job import Job
from samecurve.specs.gpus import GIB

UPDATE_BYTES = 40  # of fp32 master weight, gradient and moments that Adam reads and writes per parameter
CORE_GB_PER_S = Constant(2, "GB/s", ASSUMED, "host memory traffic of one core in the update")
STATES = 16  # bytes per parameter of what Adam updates: fp32 weight, gradient and two moments
SUMS = 4  # bytes per parameter of gradients that ZeRO-3 sums in host memory until the update, beside Adam's copy


def kept(job: Job, device: str) -> float:
    """Return the GiB that a node keeps in host memory ("cpu") or on its disk ("nvme")."""
    replicas = max(job.layout.dp // max(job.layout.shard, 1), 1)
    whole = _bytes_per_parameter(job, device) * job.shape.parameters * replicas
    if device == "cpu":
        whole += _disk_buffers(job) * job.layout.gpus
    return whole / GIB / max(job.layout.gpus / job.gpus_per_node, 1)


def _bytes_per_parameter(job: Job, device: str) -> float:
    """Return the bytes of each parameter on a device, as DeepSpeed 0.19.8 and FSDP2 allocate them."""
    found = float(STATES) if f"optimizer:{device}" in job.offload else 0.0
    if job.stack != "deepspeed":  # the weights that FSDP2 offloads are those that Adam updates
        return found
    if f"param:{device}" in job.offload:
        found += job.element_bytes
    if device == "cpu" and moves_optimizer(job):
        if job.layout.zero == 3:
            return found + SUMS
        # new weights on their way back, and sums of micro-batches' gradients
        found += job.element_bytes * (2 if job.grad_accum > 1 else 1)
    return found


def _disk_buffers(job: Job) -> float:
    """Return the bytes of host memory through which a rank reads and writes what is on a disk."""
    held = job.element_bytes * job.sharding.weight_buffers if "param:nvme" in job.offload else 0.0
    if "optimizer:nvme" in job.offload:
        held += 4 * job.sharding.state_buffers * min(job.sharding.subgroup, job.shape.parameters / job.layout.shard)
    return held


def buffers(job: Job) -> float:
    """Return the bytes through which ZeRO-1 and ZeRO-2 move a gradient to the host: of the largest weight."""
    if not (job.stack == "deepspeed" and job.layout.zero < 3 and moves_optimizer(job)):
        return 0
    shape = job.shape
    return job.element_bytes * max(math.prod(each) for each in [*shape.embedding_weights, *shape.layer_weights])


def moves_optimizer(job: Job) -> bool:
    """Whether the update happens on the host."""
    return any(each.startswith("optimizer:") for each in job.offload)


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
    if moves_optimizer(job):
        total += 2 * job.states.gradients * shard / lanes  # gradients out, weights in
        total += UPDATE_BYTES * shard * job.gpus_per_node / (CORE_GB_PER_S * 1e9 * job.host.cpu_cores)
    if "optimizer:nvme" in job.offload:
        total += 2 * 12 * shard / disk  # master weight and moments, read and written
    if any(each.startswith("param:") for each in job.offload):
        rate = disk if "param:nvme" in job.offload else lanes
        total += 2 * job.grad_accum * 2 * shard / rate  # a rank's part of the weights, for forward and backward
    return total
