"""Every constant of a plan's machines and of the formulas, with its origin: for --json, and in one line of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from samecurve.planner import (
    activations,
    answers,
    cards,
    hardware,
    kernels,
    memory,
    offload,
    profiles,
    search,
    step_time,
    tensor_lines,
)
from samecurve.planner.cluster import Cluster
from samecurve.planner.constants import CALIBRATED, FITTED, ORIGINS, Constant, flat
from samecurve.planner.job import Job

FORMULAS = (cards, hardware, kernels, step_time, memory, tensor_lines, activations, offload, profiles, answers, search)


def constants(machines: Cluster) -> dict[str, Constant]:
    """Return the constants by dotted names, for example gpu.hbm_gb_per_s or kernels.COMPILED_FLOOR."""
    found = dict(_of_machines(machines))
    for module in FORMULAS:
        name = module.__name__.rpartition(".")[2]
        # names with an underscore are parts of others
        named = {key: value for key, value in vars(module).items() if key.isupper() and key[0] != "_"}
        found |= flat(name, named)
    return found | dict(flat("hardware.node_curve", hardware.node_curve()))


def _of_machines(machines: Cluster) -> Iterator[tuple[str, Constant]]:
    for name, part in (("gpu", machines.card), ("host", machines.host)):
        yield from flat(name, {each.name: getattr(part, each.name) for each in fields(part)})
    yield from flat("network", {"gbit_per_s_per_node": machines.node_gbit})
    for index, level in enumerate(machines.levels):  # names as in a cluster file
        rates = {str(ranks): rate for ranks, rate in level.measured}
        others = {"gbit_per_s_per_node": level.node_gbit, "latency_us": level.latency_us}
        yield from flat(f"links.{index}", {"bus_gb_per_s": rates, **others})
    yield from flat("memory", {"reserved_gib": machines.reserved_gib})
    yield from flat("calibration", _learnt(machines))


def _learnt(machines: Cluster) -> dict[str, Any]:
    """Return what runs or results of bench on such machines taught."""
    learnt = machines.calibration
    if not learnt:
        return {}
    units = {
        "time": "multiple of the predicted seconds",
        "stack_time": "multiple of the predicted seconds",
        "memory": "multiple of the predicted tensors",
        "process_gib": "GiB",
    }
    return {
        name: {
            key: Constant(value, unit, CALIBRATED, learnt.describe()) for key, value in getattr(learnt, name).items()
        }
        for name, unit in units.items()
    }


def record(machines: Cluster) -> dict[str, dict[str, Any]]:
    """Return the constants as JSON: value, unit, origin and source by name."""
    return {
        name: {"value": float(each), "unit": each.unit, "origin": each.origin, "source": each.source}
        for name, each in constants(machines).items()
    }


def summary(machines: Cluster, job: Job | None) -> str:
    """Say in one line where the numbers behind a plan come from, with the values of the most important ones.

    Args:
        machines: the cluster.
        job: of the answer, None if nothing can run.
    """
    card, outer = machines.card, machines.levels[1:]
    near = machines.levels[0].measured[-1][1] if machines.levels else card.bus_gb_per_s
    shown = [("products", card.matmul_tflops), ("GPU memory", card.hbm_gb_per_s), ("links in a node", near)]
    if machines.nodes > 1:
        far = [each.measured[-1][1] if each.measured else each.node_gbit for each in outer] or [machines.node_gbit]
        names = [each.name for each in outer] or ["network"]
        shown += list(zip(names, far, strict=True))
    by_origin: dict[str, list[str]] = {each: [] for each in ORIGINS}
    for name, each in shown:
        assert isinstance(each, Constant)
        by_origin[each.origin].append(f"{name} {each:,.4g} {each.unit}")
    by_origin[FITTED].append("efficiencies, latencies, overlap")
    held = [("CUDA context", memory.CONTEXT_GIB), ("NCCL", memory.NCCL_GIB)]
    given, learnt = machines.reserved_gib, machines.calibration
    if isinstance(given, Constant):
        held = [("reserved memory", given)]
    if job and memory.reserved(job)[1] == CALIBRATED:
        held = []
        by_origin[CALIBRATED].append("reserved memory")
    gaps = memory.RESIDENT_GAPS if machines.kind == "cpu" else memory.FRAGMENTATION
    for name, each in (*held, ("fragmentation", gaps)):
        by_origin[each.origin].append(name)
    if learnt and (learnt.time or learnt.memory):
        by_origin[CALIBRATED].append("factors of all these")
    return "Inputs: " + "; ".join(f"{', '.join(names)} ({each})" for each, names in by_origin.items() if names)
