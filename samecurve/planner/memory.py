"""Memory anatomy: every line of a rank's bytes at three moments of a step. The peak is the largest moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from samecurve.planner import tensor_lines
from samecurve.planner.hardware import BY_COST, PROCESS_GIB, Profile, profile
from samecurve.planner.job import Job
from samecurve.planner.stages import Stage, stages
from samecurve.planner.tensor_lines import MOMENTS, Line
from samecurve.specs.gpus import GIB

# Assumed: ml-engineering has 0.90 and 0.92 GB of context, and 1.45 GB of buffers at the first barrier.
CONTEXT_GIB, NCCL_GIB = 0.9, 1.2
FRAGMENTATION = 0.08  # torch_reserved over torch_allocated (assumed)
# Of a process's tensors. The C library keeps some of what they give back: 0.51 GiB of tensors, and 0.63 to 0.73 GiB
# more than without, in a layer of width 512 on 16,384 tokens (AMD EPYC, torch 2.13.0, 2026-11-24).
RESIDENT_GAPS = 0.3
BLOCK_ROUNDING = 1.01  # allocated by requested bytes (assumed)
STATES = 16  # bytes per parameter of what Adam updates: fp32 weight, gradient and two moments
SUMS = 4  # bytes per parameter of gradients that ZeRO-3 sums in host memory until the update, beside Adam's copy
WORKSPACE_GIB = 0.1  # cuBLAS: up to 32 MiB for each of some streams (torch's CUBLAS_WORKSPACE_CONFIG; assumed)


@dataclass(frozen=True)
class Anatomy:
    """Memory of one class of ranks.

    Attributes:
        reserved_gib: of a process beside its tensors; None: the assumed context and NCCL.
        reserved_source: where that number comes from.
    """

    stage: Stage
    lines: tuple[Line, ...]
    reserved_gib: float | None = None
    reserved_source: str = ""
    gpus: int = 1
    gaps: float = FRAGMENTATION

    @cached_property
    def totals(self) -> dict[str, float]:
        """Allocated tensor bytes by moment."""
        return {moment: sum([getattr(line, moment) for line in self.lines]) for moment in MOMENTS}

    @cached_property
    def moment(self) -> str:
        return max(MOMENTS, key=self.totals.__getitem__)

    @property
    def peak(self) -> float:
        """Allocated tensor bytes at the largest moment."""
        return self.totals[self.moment]

    @property
    def binding(self) -> str:
        """Name of the largest line at the peak."""
        return max(self.lines, key=lambda line: getattr(line, self.moment)).name


def anatomy(job: Job, constants: Profile | None = None, chosen: Sequence[Stage] = ()) -> list[Anatomy]:
    """Compute the memory of each class of ranks. nanotron's counter is the first stage's (README of the runs).

    Args:
        constants: of its software; default: those that are shipped.
        chosen: the stages; default: one of each class.
    """
    constants = constants or profile(job.stack)
    learnt = job.calibration
    resident = job.memory_kind == "resident"
    gaps = RESIDENT_GAPS if resident else FRAGMENTATION
    held = 0 if resident else WORKSPACE_GIB * GIB
    workspaces = Line("workspaces", held, held, held, "cuBLAS, some streams", "assumed")
    kept, source = reserved(job)
    moved, offloaded = 0, []
    if job.stack == "deepspeed" and job.zero < 3 and job.updates_on_host:
        moved = job.element_bytes * max(map(math.prod, [*job.shape.embedding_weights, *job.shape.layer_weights]))
        offloaded.append(Line("offload buffer", moved, moved, moved, "the largest weight's gradient", "DeepSpeed"))
    # on a CPU, processes have the host's memory, the buffer among it
    if job.card.generation == "cpu" and job.strategy.offload:
        held = offloaded_gib(job) * GIB / min(job.gpus_per_node, job.dims.world_size) + moved
        formula = "a process's share of what the host keeps; on a CPU the memory is the same"
        offloaded.append(Line("offloaded states", held, held, held, formula, "memory.py"))
    rank_classes = []
    for stage in chosen or stages(job, job.stack in BY_COST):
        activations = tensor_lines.activations(job, stage)
        loss = tensor_lines.loss_lines(job, constants) if stage.head else []
        states = tensor_lines.states(job, stage, activations[0].backward)
        gathered = tensor_lines.gathered(job, stage, sum(line.forward for line in loss))
        lines = [*states, *tensor_lines.teacher(job), *offloaded, *activations, *loss, *gathered, workspaces]
        # last, because it fills what the other lines leave free
        lines.append(tensor_lines.gathered_inputs(job, constants, lines))
        factor = learnt.memory_factor(job.library) if learnt else 1
        if factor != 1:  # what runs on these machines measured is more, or less, than the other lines
            end, middle, update = ((factor - 1) * sum(getattr(line, moment) for line in lines) for moment in MOMENTS)
            lines.append(Line("measured slack", end, middle, update, f"{factor:.3f} x the lines above", "calibration"))
        rank_classes.append(Anatomy(stage, tuple(lines), kept, source, job.dims.world_size, gaps))
    return rank_classes


def reserved(job: Job) -> tuple[float | None, str]:
    """Find what a process of the job holds beside its tensors, in GiB, and the origin of this number.

    A cluster file's own number comes first, because it also counts what others hold on those machines.
    """
    if job.reserved_gib is not None:
        return job.reserved_gib, "cluster file"
    learnt = job.calibration.process(job.library, job.dims.world_size) if job.calibration else None
    if learnt is not None:
        return learnt, "calibration"
    return PROCESS_GIB if job.card.generation == "cpu" else None, "assumed"


# States kept outside of a GPU, as runs on a CPU have them (test_tensor_bytes.py).


def offloaded_gib(job: Job) -> float:
    """Return the GiB that a node keeps in host memory, as DeepSpeed 0.19.8 and FSDP2 allocate it."""
    per_parameter = float(STATES * job.trained) if "optimizer:cpu" in job.strategy.offload else 0.0
    per_parameter += job.states.average if job.strategy.offloads_optimizer else 0
    if job.stack != "deepspeed":  # the weights that FSDP2 offloads are those that Adam updates, and frozen ones
        per_parameter += job.frozen.weight_bytes if job.frozen and per_parameter else 0
    else:
        if "param:cpu" in job.strategy.offload:
            weights = job.frozen.weight_bytes + job.trained * job.element_bytes if job.frozen else job.element_bytes
            per_parameter += weights
        if job.updates_on_host and job.zero == 3:
            per_parameter += SUMS * job.trained
        elif job.updates_on_host:
            # new weights on their way back, and sums of micro-batches' gradients
            per_parameter += job.trained * job.element_bytes * (2 if job.grad_accum > 1 else 1)
    whole = per_parameter * job.shape.parameters * max(job.dims.dp // max(job.shard, 1), 1)
    # buffers of each rank through which it reads and writes what is on a disk
    buffers = job.element_bytes * job.sharding.weight_buffers if "param:nvme" in job.strategy.offload else 0.0
    if "optimizer:nvme" in job.strategy.offload:
        buffers += 4 * job.sharding.state_buffers * min(job.sharding.subgroup, job.shape.parameters / job.shard)
    whole += buffers * job.dims.world_size
    return whole / GIB / max(job.dims.world_size / job.gpus_per_node, 1)


def overhead(rank_class: Anatomy) -> list[Line]:
    """List what a GPU holds beside tensors: the allocator's rounding and gaps, the CUDA context and NCCL's buffers."""
    share = BLOCK_ROUNDING * (1 + rank_class.gaps) - 1
    end, middle, update = (rank_class.totals[moment] * share for moment in MOMENTS)
    origin = "assumed" if rank_class.gaps == FRAGMENTATION else "measured"
    fragmentation = Line("fragmentation", end, middle, update, f"{share:.0%} of the tensors", origin)
    if rank_class.reserved_gib is not None:
        held = rank_class.reserved_gib * GIB
        return [fragmentation, Line("reserved", held, held, held, "context and libraries", rank_class.reserved_source)]
    context, nccl = CONTEXT_GIB * GIB, NCCL_GIB * GIB if rank_class.gpus > 1 else 0
    return [
        fragmentation,
        Line("context", context, context, context, "CUDA context with torch's kernels", "assumed"),
        Line("NCCL", nccl, nccl, nccl, "buffers of several communicators", "assumed"),
    ]


def counted(rank_class: Anatomy, memory_kind: str) -> float:
    """Return the peak in bytes that a counter shows: torch_allocated, torch_active, torch_reserved or nvidia_smi."""
    if memory_kind in ("", "torch_allocated", "torch_active"):
        return rank_class.peak * BLOCK_ROUNDING
    lines = overhead(rank_class)[:1] if memory_kind == "torch_reserved" else overhead(rank_class)
    return rank_class.peak + sum(getattr(line, rank_class.moment) for line in lines)
