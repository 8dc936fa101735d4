"""Results of `bench matmul`, `collectives` and `memory` (--json FILE) in place of what the planner assumes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.planner import collectives
from samecurve.planner.calibration import ALONE, Calibration
from samecurve.planner.hardware import DEFAULT_NODE_GBIT, PROCESS_GIB, Gpu, canonical, gpu, link
from samecurve.planner.memory import CONTEXT_GIB, NCCL_GIB
from samecurve.storage.records import read_record

VOLUMES = {
    "all_reduce": collectives.all_reduce_volume,
    "all_gather": collectives.all_gather_volume,
    "reduce_scatter": collectives.all_gather_volume,
}
ZERO = "deepspeed"  # as Job.library
COMMUNICATORS = "communicators"  # the part of a GPU's memory that only several processes hold
LARGEST = 2  # message sizes of each collective that count: training moves large ones


@dataclass(frozen=True)
class BenchResult:
    """A measurement of the hardware.

    Attributes:
        learnt: what it teaches about its kind of hardware.
        note: what was measured and what was assumed.
        facts: of the file, with `device`, `versions` and `date`.
    """

    path: Path
    learnt: Calibration
    note: str
    facts: Mapping[str, Any]


def read(path: Path) -> BenchResult | None:
    """Read a result of `bench`; None if the file is none. Raises ConfigurationError for one that teaches nothing."""
    content = read_record(path, {"benchmark": str, "device?": str}).value
    if content is None:
        return None
    kind = "cpu" if content.get("device_type", "cpu") == "cpu" else canonical(content.get("device", ""))
    readers = {"matmul": _compute, "collectives": _communication, "memory": _memory}
    reader = readers.get(content["benchmark"])
    if not reader:
        text = f"--calibrate {path}: bench {content['benchmark']} measures nothing that the planner uses"
        *most, last = readers
        raise ConfigurationError(f"{text}; give results of bench {', '.join(most)} or {last}")
    try:
        learnt, note = reader(content, kind, gpu(kind))
    except (AttributeError, KeyError, TypeError, ValueError, statistics.StatisticsError) as error:
        raise ConfigurationError(f"--calibrate {path}: not what bench writes: {error}") from None
    return BenchResult(path, learnt, note, content)


def _compute(content: Mapping[str, Any], kind: str, card: Gpu) -> tuple[Calibration, str]:
    """Compare the fastest square product with the best one assumed: in bf16, and on a CPU in fp32 on one core."""
    precision, share = ("fp32", content["threads"]) if kind == "cpu" else ("bf16", 1)
    assumed = card.fp32_tflops if kind == "cpu" else card.matmul_tflops
    best = max(content["tflops"][precision].values()) / share
    note = f"{precision} products {best:.3g} TFLOP/s, assumed {assumed:.3g}"
    return Calibration(kind, time={"compute": assumed / best}), note


def _communication(content: Mapping[str, Any], kind: str, card: Gpu) -> tuple[Calibration, str]:
    """Compare the seconds of the largest messages with those of the formulas, on one machine or over several."""
    ranks, machines = content["processes"], content["machines"]
    over = link(card, max(1, ranks // machines), DEFAULT_NODE_GBIT, ranks, 1, 0.0)
    ratios, rates = [], []
    for name, volume in VOLUMES.items():
        timings = sorted((each for each in content["timings"] if each["name"] == name), key=itemgetter("num_bytes"))
        for each in timings[-LARGEST:]:
            ratios.append(each["seconds"] / collectives.seconds(volume(each["num_bytes"], ranks), ranks, over))
            rates.append(each["bus_gb_per_second"])
    factor = statistics.geometric_mean(ratios)
    text = f"bus bandwidth up to {max(rates):.3g} GB/s over the {over.level}, assumed {over.bus_gb_per_s:.3g}"
    return Calibration(kind, time={"communication": factor}), text


def _memory(content: Mapping[str, Any], kind: str, _: Gpu) -> tuple[Calibration, str]:
    """Add up what a process holds beside its tensors: on a CPU by library, on a GPU with and without communicators."""
    parts = content["parts_gib"]
    process = {library: math.fsum(held.values()) for library, held in parts.items()}
    assumed: float = PROCESS_GIB
    if kind != "cpu":
        (held,) = parts.values()
        (whole,) = process.values()
        process = {ALONE: whole - held.get(COMMUNICATORS, 0.0), **({"": whole} if COMMUNICATORS in held else {})}
        assumed = CONTEXT_GIB + NCCL_GIB if COMMUNICATORS in held else CONTEXT_GIB
    elif ZERO in process:
        process[f"{ZERO} pipeline"] = process[ZERO]  # the same package
    if min(process.values()) <= 0:
        raise ValueError(f"parts_gib: found {process}, expected GiB above 0")
    return Calibration(kind, process_gib=process), f"{held_text(process)} beside tensors, assumed {assumed:.2f} GiB"


def held_text(process_gib: Mapping[str, float]) -> str:
    return ", ".join(f"{name or 'others'} {value:.2f} GiB" for name, value in process_gib.items())


def together(kind: str, results: Sequence[BenchResult]) -> Calibration:
    """Average the factors of each group, and the memory of each library."""
    learnt = [each.learnt for each in results]
    time = _averaged([each.time for each in learnt], statistics.geometric_mean)
    return Calibration(kind, time=time, process_gib=_averaged([each.process_gib for each in learnt], statistics.fmean))


def _averaged(found: Sequence[Mapping[str, float]], mean: Callable[[Sequence[float]], float]) -> dict[str, float]:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: mean([each[name] for each in found if name in each]) for name in names}
