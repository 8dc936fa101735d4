"""Results of `bench matmul` and `bench collectives` (--json FILE) as factors of the planner's assumed rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.planner import collectives
from samecurve.planner.hardware import DEFAULT_NODE_GBIT, Gpu, canonical, gpu, known_gpu, link
from samecurve.storage.atomic import read_json

VOLUMES = {
    "all_reduce": collectives.all_reduce_volume,
    "all_gather": collectives.all_gather_volume,
    "reduce_scatter": collectives.all_gather_volume,
}
LARGEST = 2  # message sizes of each collective that count: training moves large ones


@dataclass(frozen=True)
class BenchResult:
    """A measurement of the hardware.

    Attributes:
        kind: of the hardware, as GPUs are named here, or cpu.
        factors: by group of the parts of a step: measured over assumed seconds.
        note: what was measured and what was assumed.
        facts: of the file, with `device`, `versions` and `date`.
    """

    path: Path
    kind: str
    factors: Mapping[str, float]
    note: str
    facts: Mapping[str, Any]


def read(path: Path) -> BenchResult | None:
    """Read a result of `bench`; None if the file is none. Raises ConfigurationError for one that teaches nothing."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or "benchmark" not in content:
        return None
    device = content.get("device", "")
    is_gpu = content.get("device_type", "cpu") != "cpu" or known_gpu(device)  # files before the key know no other GPU
    kind = canonical(device) if is_gpu else "cpu"
    readers = {"matmul": _compute, "collectives": _communication}
    reader = readers.get(content["benchmark"])
    if not reader:
        text = f"--calibrate {path}: bench {content['benchmark']} measures no rate that the planner uses"
        raise ConfigurationError(f"{text}; give the results of bench {' or '.join(readers)}")
    try:
        factors, note = reader(content, kind, gpu(kind))
    except (KeyError, TypeError, ValueError, statistics.StatisticsError) as error:
        raise ConfigurationError(f"--calibrate {path}: not what bench writes: {error}") from None
    return BenchResult(path, kind, factors, note, content)


def _compute(content: Mapping[str, Any], kind: str, card: Gpu) -> tuple[dict[str, float], str]:
    """Compare the fastest square product with the best one assumed: in bf16, and on a CPU in fp32 on one core."""
    precision, share = ("fp32", content["threads"]) if kind == "cpu" else ("bf16", 1)
    assumed = card.fp32_tflops if kind == "cpu" else card.matmul_tflops
    best = max(content["tflops"][precision].values()) / share
    note = f"{precision} products {best:.3g} TFLOP/s, assumed {assumed:.3g}"
    return {"compute": assumed / best}, note


def _communication(content: Mapping[str, Any], kind: str, card: Gpu) -> tuple[dict[str, float], str]:
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
    return {"communication": factor}, text


def together(results: Sequence[BenchResult]) -> dict[str, float]:
    """Average the factors of each group."""
    groups = dict.fromkeys(group for each in results for group in each.factors)
    return {
        group: math.exp(statistics.fmean(math.log(each.factors[group]) for each in results if group in each.factors))
        for group in groups
    }
