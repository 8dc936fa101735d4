"""Results of `bench matmul`, `collectives` and `memory` (--json FILE) in place of what the planner assumes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.planner import calibration, links, memory, plan_text, step_time
from samecurve.planner.calibration import ALONE, GROUPS, Calibration
from samecurve.planner.cluster import node_gbit
from samecurve.planner.hardware import PROCESS_GIB, Gpu, canonical, gpu, profile
from samecurve.planner.job import Job, from_json
from samecurve.planner.memory import CONTEXT_GIB, NCCL_GIB
from samecurve.specs.gpus import GIB
from samecurve.storage.atomic import utc_timestamp
from samecurve.storage.jsonl import EvenlySpaced, scan
from samecurve.storage.records import COUNT, read_record

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
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


def read_bench(path: Path) -> BenchResult | None:
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
    per_node = max(1, ranks // machines)
    constants = profile("")  # of no stack; a stack's own share of the network is near
    levels, step = links.levels_of(card, per_node, node_gbit(card)), constants.ring_step_us * 1e-6
    over = links.link(levels, per_node, ranks, 1, constants.network_share, step)
    ratios, rates = [], []
    for name in COLLECTIVES:
        timings = sorted(
            (timing for timing in content["timings"] if timing["name"] == name), key=itemgetter("num_bytes")
        )
        for timing in timings[-LARGEST:]:
            size = timing["num_bytes"]
            of_reduce = name == "all_reduce"
            volume = links.all_reduce_volume(size, ranks) if of_reduce else links.one_way_volume(size, ranks, over)
            ratios.append(timing["seconds"] / links.collective_seconds(volume, ranks, over))
            rates.append(timing["bus_gb_per_second"])
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
    learnt = [result.learnt for result in results]
    time = _averaged([factors.time for factors in learnt], statistics.geometric_mean)
    return Calibration(
        kind, time=time, process_gib=_averaged([factors.process_gib for factors in learnt], statistics.fmean)
    )


def _averaged(tables: Sequence[Mapping[str, float]], mean: Callable[[Sequence[float]], float]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: mean([table[name] for table in tables if name in table]) for name in names}


# Learns efficiencies and slack of a machine from finished runs. The formulas stay as they are.


_LINE = {"step": COUNT, "step_seconds": float, "peak_memory_gib": float}
FEWEST_STEPS = 3  # behind the session's first one, which compiles, allocates and connects
# Expected: runs vary by 7 %, parts of a step differ by e^0.5 from their common factor and libraries by e^0.4. A factor
# that strays so far costs as much as one run's usual error: the squares of 0.07 / 0.5 and of 0.07 / 0.4.
CAUTION, LIBRARY_CAUTION = 0.02, 0.03
FIRST_MOVE, LAST_MOVE = 0.5, 0.002
# 90 % quantiles of Student's t by degrees of freedom: few runs say little about the width of an interval.
STUDENT = (3.08, 1.89, 1.64, 1.53, 1.48, 1.44, 1.41, 1.40, 1.38, 1.37)
LEAST_WIDTH = 0.05  # step times of one configuration differ by 5 % as a rule


@dataclass(frozen=True)
class FinishedRun:
    """A run's job, and what it measured: the median step after the first, and the peak memory of rank 0.

    Attributes:
        facts: run.json.
    """

    folder: Path
    job: Job
    seconds: float
    memory_gib: float
    facts: Mapping[str, Any]


def read_run(folder: Path) -> FinishedRun:
    """Read a run directory. Raises ConfigurationError, which says why the run teaches nothing."""
    record = read_record(folder / "run.json", {"predicted?": dict, "start_step?": COUNT})
    if record.is_damaged:
        raise ConfigurationError(f"--calibrate {record.path}: {record.problem}; give another run")
    facts = record.value or {}
    if not facts:
        lack = "no run here (run.json)" if folder.exists() else "no such file or folder"
        fix = "give the output_dir of a run, a result of bench or a calibration file"
        raise ConfigurationError(f"--calibrate {folder}: {lack}; {fix}")
    predicted = facts.get("predicted", {})
    if "job" not in predicted:
        reason = predicted.get("reason", "predicted.job is missing")
        raise ConfigurationError(f"--calibrate {folder}: the run has no prediction to learn from: {reason}")
    # metrics.jsonl also has the steps of earlier sessions, perhaps on other hardware
    own = EvenlySpaced()
    for _, line in scan(folder / "metrics.jsonl", _LINE):
        if line and line["step"] > facts.get("start_step", 0):
            own.add(line)
    if own.num_added <= FEWEST_STEPS:
        raise ConfigurationError(
            f"--calibrate {folder}: {own.num_added} steps since the last start; {FEWEST_STEPS + 1} are needed, of "
            "which the first does not count"
        )
    try:
        job = from_json(predicted["job"])
    except ValueError as error:
        text = f"--calibrate {folder}: run.json is of another version: predicted.job: {error}"
        raise ConfigurationError(text) from None
    if job.gpu_kind == "cpu":  # factors are relative to one set of rates, not to what each start measured
        job = replace(job, card=replace(gpu("cpu"), memory_gib=job.card.memory_gib))
    first, *others = own
    memory_gib = max(line["peak_memory_gib"] for line in (first, *others))
    return FinishedRun(folder, job, statistics.median(line["step_seconds"] for line in others), memory_gib, facts)


def from_paths(paths: Sequence[Path]) -> tuple[Calibration, str]:
    """Read a calibration file, or learn from runs and results of bench and write the file that later plans read.

    Returns:
        The calibration, and what to print about what was learnt; "" for a calibration file.

    Raises:
        ConfigurationError: a path teaches nothing, or is a calibration file beside others.
    """
    bench_by_path = {path: read_bench(path) for path in paths if path.is_file()}
    runs = [read_run(folder) for folder in paths if folder not in bench_by_path]
    # a file that bench has not written is a calibration
    for path in (path for path, bench in bench_by_path.items() if not bench):
        learnt = calibration.read(path)
        if learnt and len(paths) == 1:
            return learnt, ""
        told = "the file is empty" if learnt is None else "a calibration file cannot be combined with other paths"
        raise ConfigurationError(f"--calibrate {path}: {told}; give runs and results of bench, or one calibration file")
    benches = [result for result in bench_by_path.values() if result]
    learnt = learn(runs, benches)
    path = calibration.default_path(learnt.kind)
    calibration.write(learnt, path)
    learnt = replace(learnt, path=str(path))
    return (
        learnt,
        f"{report(runs, learnt, benches)}\n\nwritten: {path}, which plans and runs on {learnt.kind} read from now on",
    )


def learn(runs: Sequence[FinishedRun], benches: Sequence[BenchResult] = ()) -> Calibration:
    """Fit the factors to runs of one kind of hardware, with intervals from the runs left out one at a time.

    Args:
        benches: measurements of the hardware, from whose factors those of the runs stray with caution. Memory that a
            run measured replaces that of its library: it also counts what a whole run keeps, such as its data.
    """
    kinds = sorted({*(canonical(run.job.gpu_kind) for run in runs), *(bench.learnt.kind for bench in benches)})
    if len(kinds) != 1:
        raise ConfigurationError(f"--calibrate: the runs are of different hardware: {', '.join(kinds)}; give one kind")
    facts = runs[-1].facts if runs else benches[-1].facts
    measured = together(kinds[0], benches)
    origin = {
        "device": facts.get("device"),
        "processor": facts.get("hardware", {}).get("processor") if runs else facts["device"],
        "versions": facts.get("versions", {}),
        "date": utc_timestamp(),
        "runs": [str(run.folder) for run in runs],
        "bench": [str(bench.path) for bench in benches],
    }
    left_out = errors_left_out(runs, benches)
    return replace(
        _fitted(runs, measured) if runs else measured,
        origin=origin,
        time_interval=_interval([time for time, _ in left_out]),
        memory_interval=_interval([held for _, held in left_out]),
    )


def errors(runs: Sequence[FinishedRun], learnt: Calibration | None = None) -> list[tuple[float, float]]:
    """Return the logarithms of (measured / predicted step time, the same of memory) of each run."""
    seconds = [step_time.breakdown(replace(run.job, calibration=learnt)).total for run in runs]
    return [(math.log(run.seconds / one), _memory_error(run, learnt)) for run, one in zip(runs, seconds, strict=True)]


def errors_left_out(runs: Sequence[FinishedRun], benches: Sequence[BenchResult] = ()) -> list[tuple[float, float]]:
    """Return the errors of each run, predicted with what the others and bench teach; none of fewer than two runs."""
    if len(runs) < 2:
        return []
    others = [[*runs[:index], *runs[index + 1 :]] for index in range(len(runs))]
    measured = together(canonical(runs[0].job.gpu_kind), benches)
    return [errors([run], _fitted(rest, measured))[0] for run, rest in zip(runs, others, strict=True)]


def _memory_error(run: FinishedRun, learnt: Calibration | None) -> float:
    return math.log(run.memory_gib / shown_gib(replace(run.job, calibration=learnt)))


def shown_gib(job: Job) -> float:
    """Return what the job's counter shows on rank 0, in GiB; in a pipeline, rank 0 is of the first stage."""
    return memory.counted(memory.anatomy(job)[0], job.memory_kind) / GIB


def _interval(left_out: Sequence[float]) -> tuple[float, float] | None:
    """Return the 80 % interval of a further run by Student's t; None where no run could be left out."""
    if not left_out:
        return None
    quantile = STUDENT[min(len(left_out) - 1, len(STUDENT)) - 1]  # n - 1 degrees of freedom
    width = quantile * max(LEAST_WIDTH, math.sqrt(statistics.fmean(error**2 for error in left_out)))
    return -width, width


def _fitted(runs: Sequence[FinishedRun], measured: Calibration) -> Calibration:
    time, stack_time = _time_factors(runs, measured.time)
    fitted = replace(measured, time=time, stack_time=stack_time)
    # the counter is the process's resident memory, of which Python and libraries are a fixed amount
    if fitted.kind == "cpu":

        def process_gib(run: FinishedRun) -> float:
            tensors = shown_gib(replace(run.job, reserved_gib=0.0, calibration=None))
            return max(0.05, run.memory_gib - tensors)

        of_runs = _by_library(runs, process_gib, statistics.fmean)
        return replace(fitted, process_gib={**fitted.process_gib, **of_runs})
    ratios = _by_library(runs, lambda run: math.exp(_memory_error(run, None)), statistics.geometric_mean)
    return replace(fitted, memory=ratios)


def _time_factors(
    runs: Sequence[FinishedRun], measured: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Find one factor of all step times, from which each part's and each library's strays with caution.

    Returns:
        Factors by group of parts, and by library; no libraries where the runs are all of one.
    """
    parts = []  # of each run, seconds by group
    for run in runs:
        sums = dict.fromkeys(GROUPS, 0.0)
        for part, seconds in asdict(step_time.breakdown(run.job)).items():
            name = calibration.group(part)
            sums[name] += measured.get(name, 1) * seconds
        parts.append(sums)
    libraries = sorted({run.job.library for run in runs})
    libraries = libraries if len(libraries) > 1 else []  # a single one's factor would be the common one

    def cost(moves: Mapping[str, float]) -> float:
        missed = 0.0
        for run, part in zip(runs, parts, strict=True):
            seconds = sum(math.exp(moves["all"] + moves[name]) * part[name] for name in GROUPS)
            missed += (math.log(seconds / run.seconds) + moves.get(run.job.library, 0.0)) ** 2
        return missed + sum(caution * moves[name] ** 2 for name, caution in cautions.items())

    cautions = {**dict.fromkeys(GROUPS, CAUTION), **dict.fromkeys(libraries, LIBRARY_CAUTION)}
    optimum = minimize(cost, dict.fromkeys(("all", *cautions), 0.0))
    of_parts = {name: measured.get(name, 1) * math.exp(optimum["all"] + optimum[name]) for name in GROUPS}
    return of_parts, {name: math.exp(optimum[name]) for name in libraries}


def minimize(cost: Callable[[Mapping[str, float]], float], start: Mapping[str, float]) -> dict[str, float]:
    """Search along one number at a time, with smaller and smaller moves."""
    best, least, move = dict(start), cost(start), FIRST_MOVE
    while move > LAST_MOVE:
        better = False
        for name in best:
            for step in (move, -move):
                tried = {**best, name: best[name] + step}
                if (tried_cost := cost(tried)) < least - 1e-12:  # rounding errors are no progress
                    best, least, better = tried, tried_cost, True
        move = move if better else move / 2
    return best


def _by_library(
    runs: Sequence[FinishedRun], value: Callable[[FinishedRun], float], mean: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """Average a value over the runs of each library, and over all libraries under ""."""
    names = sorted({run.job.library for run in runs})
    means = {name: mean([value(run) for run in runs if run.job.library == name]) for name in names}
    return {**means, "": mean([*means.values()])}


def report(runs: Sequence[FinishedRun], learnt: Calibration, benches: Sequence[BenchResult] = ()) -> str:
    """Format predicted against measured: as shipped, with all runs' factors, and with those of the other runs."""
    columns = [errors(runs), errors(runs, learnt), errors_left_out(runs, benches)]
    header = ["run", "strategy", "step s", "before", "after", "left out", "memory GiB", "before", "after", "left out"]
    rows = [header]
    for index, run in enumerate(runs):
        # log(measured / predicted), shown as the error of the prediction
        shown = [
            [f"{math.expm1(-column[index][part]):+.0%}" if column else "-" for column in columns] for part in (0, 1)
        ]
        strategy = str(run.facts.get("strategy", ""))
        rows.append([str(run.folder), strategy, f"{run.seconds:.3f}", *shown[0], f"{run.memory_gib:.2f}", *shown[1]])
    factors = ", ".join(f"{name} {value:.3f}" for name, value in learnt.time.items())
    stacks = ", ".join(f"{name} {value:.3f}" for name, value in learnt.stack_time.items())
    beside = held_text(learnt.process_gib)
    slack = ", ".join(f"{name or 'others'} {value:.3f}" for name, value in learnt.memory.items())
    named = {"time": factors, "whole step": stacks, "process without tensors": beside, "tensors": slack}
    lines = [f"{name}: {text}" for name, text in named.items() if text]
    tables = ["predicted against measured:", plan_text.aligned(rows), ""] if runs else []
    return "\n".join([*(f"{bench.path}: {bench.note}" for bench in benches), *tables, "learnt:", *lines])
