"""Reads a table of runs (runs.csv) into jobs. Measured columns are never read."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.planner import memory, step_time
from samecurve.planner.calibration import Calibration
from samecurve.planner.hardware import BY_COST, canonical, gpu, is_known, is_unknown, shipped
from samecurve.planner.job import Job, StateBytes
from samecurve.planner.model_shape import ModelShape
from samecurve.specs.gpus import GIB
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Strategy

NEEDED = (
    "id stack layers hidden heads kv_heads ffn mlp vocab tied experts top_k gpu gpu_memory_gib gpus_per_node "
    "inter_node_gbit gpus dp tp pp cp ep virtual_stages schedule zero shard sequence_parallel micro_batch grad_accum "
    "global_batch seq precision weight_bytes grad_bytes accum_bytes master_bytes optim_bytes flash compile async_tp "
    "fp8_recipe chunked_loss packed_experts activation_checkpointing memory_kind"
).split()
USUAL_HEAD, USUAL_VOCABULARY = 128, 50_257  # width of an attention head; GPT-2's vocabulary
SURPLUS = "cells without a column"  # contains spaces, unlike the names of columns
UNUSED = (
    "source url model params_b step_s tokens_per_s_per_gpu mfu_pct_published memory_gib status oom_evidence time_ok "
    "memory_ok quality note"
).split()


def read_runs(path: Path) -> list[dict[str, str]]:
    """Read the rows, in any order of columns.

    Raises:
        ConfigurationError: columns are unknown, missing or twice there, a row has more cells than there are columns,
            or there is no row.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, restkey=SURPLUS, restval="")  # a row may end early
            rows = [(table.line_num, row) for row in table]
            names = list(table.fieldnames or [])
    except OSError as error:
        raise ConfigurationError(f"--runs {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"--runs {path}: not a CSV file in UTF-8: {error}") from None
    problems = [f"{path}: column {name!r} is missing" for name in NEEDED if name not in names]
    problems += [f"{path}: unknown column {name!r}" for name in names if name not in (*NEEDED, *UNUSED)]
    problems += [f"{path}: column {name!r} is there twice" for name, count in Counter(names).items() if count > 1]
    if not problems:  # rows of other columns say nothing
        for line, row in rows:
            if SURPLUS in row:
                beyond = ", ".join(map(repr, row[SURPLUS]))[:60]
                fix = "quote a cell with a comma, or remove them"
                problems.append(f"{path}:{line}: cells beyond the last column: {beyond}; {fix}")
        problems += [] if rows else [f"{path}: no row below the names of the columns; give a row for each run"]
    if problems:
        raise ConfigurationError("\n".join(problems))
    return [row for _, row in rows]


class _Cells(dict[str, str]):
    """The cells of a row by column. Raises ValueError, which names the column."""

    def word(self, name: str) -> str:
        """Return a word of a list, in small letters: a table may say Megatron."""
        return self[name].strip().lower()

    def number(self, name: str, default: float = 0) -> float:
        text = self[name].strip()
        try:
            value = float(text) if text else default
        except ValueError:
            raise ValueError(f"column {name}: {text!r} is not a number") from None
        if not math.isfinite(value) or value < 0:
            legal = "a finite number" if value > 0 or math.isnan(value) else "no negative number"
            raise ValueError(f"column {name}: found {text!r}, expected {legal}; leave the cell empty if it is unknown")
        return value

    def count(self, name: str, default: int = 1) -> int:
        """Return a number; `default` where there is none, or 0."""
        return int(self.number(name, default)) or default

    def size(self, name: str, default: float = 0) -> int:
        """Return a positive number, without which nothing is known."""
        value = int(self.number(name, default))
        if value < 1:
            raise ValueError(f"column {name}: found {self[name].strip()!r}, expected a positive number")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.number(name))


def job_of_row(row: dict[str, str]) -> Job:
    """Turn a row into a job.

    What a row leaves out follows from its other cells where they imply it, and is what is usual where they do not.

    Raises:
        ValueError: a cell is no number, or negative, or one without which nothing is known is missing; it names the
            column.
    """
    cells = _Cells(row)
    gated, hidden = cells.word("mlp") != "gelu", cells.size("hidden")
    heads = cells.size("heads", max(1, hidden // USUAL_HEAD))
    ffn = cells.size("ffn", round(8 * hidden / 3) if gated else 4 * hidden)
    shape = ModelShape(
        cells.size("layers"), hidden, heads, cells.count("kv_heads", heads), ffn,
        cells.size("vocab", USUAL_VOCABULARY), gated, cells.flag("tied"), int(cells.number("experts")),
        int(cells.number("top_k")), 0 if gated else cells.size("seq"),  # learned positions of a GPT
    )  # fmt: skip
    sizes = {name: cells.count(name) for name in ("tp", "pp", "cp", "ep")}
    replicas = cells.count("dp", max(1, cells.count("gpus") // (sizes["tp"] * sizes["pp"] * sizes["cp"])))
    zero = int(cells.number("zero"))
    shard = cells.count("shard", replicas) if zero else 1
    strategy = Strategy(
        sharding=f"zero{zero}" if zero else "none", schedule=row["schedule"].strip(),
        dims=ParallelDims(dp_replicate=replicas // shard, dp_shard=shard, **sizes),
        tp_sequence_parallel=cells.flag("sequence_parallel"),
    )  # fmt: skip
    rows = max(1, cells.count("global_batch") // replicas)  # of a step on one data-parallel rank
    micro_batch = cells.size("micro_batch", max(1, rows // cells.count("grad_accum")))
    states = [cells.number(f"{name}_bytes") for name in ("weight", "grad", "accum", "master", "optim")]
    kind, precision = row["gpu"].strip(), cells.word("precision")
    if not kind:
        raise ValueError("column gpu: missing; give a kind such as H100-80GB")
    return Job(
        shape, strategy, gpu(kind), micro_batch, cells.size("seq"),
        cells.count("grad_accum", max(1, rows // micro_batch)),
        StateBytes(*states) if any(states) else StateBytes(), kind, cells.number("gpu_memory_gib"),
        cells.count("gpus_per_node", 8), cells.number("inter_node_gbit"), "fp8" if "fp8" in precision else precision,
        cells.word("fp8_recipe"), cells.flag("flash"), cells.flag("compile"), cells.flag("async_tp"),
        cells.flag("chunked_loss"), cells.word("activation_checkpointing") or "none", cells.word("stack"),
        cells.word("memory_kind"), packed_experts=cells.flag("packed_experts"),
        virtual_stages=cells.count("virtual_stages"),
    )  # fmt: skip


# Predictions with intervals, one per row of a table of runs.


ONE_NODE, LARGE = 8, 128
# Assumed multiple of an interval's width where no public run is near: experts, fp8, fp32, context parallelism,
# offloading, other GPUs, more GPUs.
UNMEASURED = 1.6
# Logarithms of measured by predicted, assumed: a GPU that is counted as an A100, stacks without residuals in
# profiles.json, and CPUs, of which there is no public run.
UNKNOWN_GPU = math.log(2)
DEFAULT_WIDTHS = (-0.35, 0.35)
CPU_WIDTHS = {"time": (-1.4, 1.4), "memory": (-0.3, 0.3)}


@dataclass(frozen=True)
class MemoryPrediction:
    """Memory of a job with its 80 % interval, and whether it fits."""

    memory_gib: float
    memory_interval: tuple[float, float]
    total_memory_gib: float
    fits: bool
    binding: str

    @property
    def total_interval(self) -> tuple[float, float]:
        """80 % interval of all that a GPU holds, in GiB."""
        share = self.total_memory_gib / self.memory_gib
        low, high = self.memory_interval
        return low * share, high * share

    def verdict(self, job: Job) -> str:
        """fits: also at the upper end of the memory interval. tight: only in the middle of it, or if the host's is."""
        if not self.fits:
            return "too large"
        return "fits" if self.total_interval[1] <= job.memory_gib and not job.assumes_host else "tight"


@dataclass(frozen=True)
class Prediction(MemoryPrediction):
    """Step time and memory of a job, each with an 80 % interval, and whether it fits."""

    seconds: float
    seconds_interval: tuple[float, float]


def situations(job: Job, known: bool | None = None) -> list[str]:
    """List the keys under which residuals of similar runs are found, the most similar first."""
    gpus = job.dims.world_size
    size = "one node" if gpus <= ONE_NODE else "network" if gpus <= LARGE else "large"
    known = is_known(job.stack) if known is None else known
    return [f"{job.stack} {size}", job.stack, "unknown"] if known else ["unknown"]


def interval(
    value: float, job: Job, residuals: Mapping[str, Sequence[float]], known: bool | None = None
) -> tuple[float, float]:
    """Multiply a value by the 10 % and 90 % quantiles of measured over predicted in similar runs left out of a fit.

    A situation is often one source's, so that its interval is not narrower than its whole stack's.

    Args:
        residuals: their logarithms by situation.
        known: whether the value was predicted with constants of the job's own stack; None: as shipped.
    """
    *similar, unknown = situations(job, known)
    widths = [residuals[key] for key in similar if key in residuals] or [residuals.get(unknown, DEFAULT_WIDTHS)]
    low, high = min(low for low, _ in widths), max(high for _, high in widths)
    public = shipped().get("public", {})
    is_new = job.gpu_kind and canonical(job.gpu_kind) not in public.get("gpus", ())
    is_new = is_new or job.precision in ("fp8", "fp32") or job.dims.world_size > public.get("most_gpus", math.inf)
    wider = UNMEASURED if is_new or job.strategy.offload or job.shape.experts or job.dims.cp > 1 else 1
    # all residuals of a situation may have one sign, yet the interval has to contain the prediction
    return value * math.exp(wider * min(low, 0)), value * math.exp(wider * max(high, 0))


def _interval(value: float, job: Job, quantity: str) -> tuple[float, float]:
    """Return the interval of `quantity`, time or memory: the calibration's, if it has one, else that of public runs."""
    learnt = getattr(job.calibration, f"{quantity}_interval", None)
    if learnt or job.gpu_kind == "cpu":
        low, high = learnt or CPU_WIDTHS[quantity]
        return value * math.exp(low), value * math.exp(high)
    low, high = interval(value, job, shipped().get("residuals", {}).get(quantity, {}))
    if quantity == "time" and is_unknown(job.gpu_kind):
        return min(low, value * math.exp(-UNKNOWN_GPU)), max(high, value * math.exp(UNKNOWN_GPU))
    return low, high


def predict(job: Job) -> Prediction:
    """Predict one job."""
    return prediction(job, predict_memory(job), step_time.breakdown(job).total)


def prediction(job: Job, memory_use: MemoryPrediction, seconds: float) -> Prediction:
    """Put memory and step time of one job together."""
    return Prediction(*vars(memory_use).values(), seconds=seconds, seconds_interval=_interval(seconds, job, "time"))


def predict_memory(job: Job) -> MemoryPrediction:
    """Predict the memory of one job, without its step time."""
    classes = memory.anatomy(job)
    shown = fullest_gib(job, classes)
    # what fits is judged by all that a GPU holds, whichever counter `shown` is of
    fullest = max(classes, key=lambda rank_class: rank_class.peak)
    total = memory.counted(fullest, "nvidia_smi") / GIB
    return MemoryPrediction(shown, _interval(shown, job, "memory"), total, total <= job.memory_gib, fullest.binding)


def fullest_gib(job: Job, classes: Sequence[memory.Anatomy]) -> float:
    """Return the GiB that the job's counter shows of the rank with the most; in nanotron's grid of the first stage."""
    shown = classes[:1] if job.stack in BY_COST else classes
    return max(memory.counted(rank_class, job.memory_kind) for rank_class in shown) / GIB


def answer(row: dict[str, str], learnt: Calibration | None = None) -> dict:
    """Answer one row of a table of runs in the form of `plan --runs`; on the hardware of `learnt`, with its factors."""
    try:
        job = job_of_row(row)
        if learnt and learnt.kind == canonical(job.gpu_kind):
            job = replace(job, calibration=learnt)
        predicted = predict(job)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        # one strange row must not end the answers of a whole table
        return {"id": row["id"], "unsupported": str(error)}
    (low, high), (least, most) = predicted.seconds_interval, predicted.memory_interval
    return {
        "id": row["id"],
        "step_seconds": predicted.seconds,
        "step_seconds_low": low,
        "step_seconds_high": high,
        "peak_memory_gib": predicted.memory_gib,
        "peak_memory_gib_low": least,
        "peak_memory_gib_high": most,
        "fits": predicted.fits,
        "binding": predicted.binding,
    }
