"""Tables of a plan, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from samecurve.planner import hardware, ledger, memory
from samecurve.planner.cluster import Cluster
from samecurve.planner.inputs import PlanRequest
from samecurve.planner.job import Job
from samecurve.planner.ledger import Exchange
from samecurve.planner.memory import Anatomy, overhead
from samecurve.planner.search import Choice
from samecurve.planner.step_time import StepTime
from samecurve.planner.tensor_lines import MOMENTS
from samecurve.specs.gpus import GIB, MIB
from samecurve.storage.terminal import aligned


def short_seconds(value: float) -> str:
    """Format seconds with three figures, 1,000 and more without an exponent: 0.139, 15.7, 86,400."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def anatomy_table(rank_class: Anatomy) -> str:
    """Format one class of ranks: GiB of every line at every moment, its formula and source."""
    rows = [[f"{rank_class.stage.name} stage, GiB", *MOMENTS]]
    shown = [
        line for line in (*rank_class.lines, *overhead(rank_class)) if any(getattr(line, moment) for moment in MOMENTS)
    ]
    rows += [[line.name, *(f"{getattr(line, moment) / GIB:.2f}" for moment in MOMENTS)] for line in shown]
    rows.append(["total", *(f"{sum(getattr(line, moment) for line in shown) / GIB:.2f}" for moment in MOMENTS)])
    texts = aligned(rows).splitlines()
    notes = ["", *(f"{line.formula} ({line.source})" for line in shown), ""]
    described = [f"{text}  {note}".rstrip() for text, note in zip(texts, notes, strict=True)]
    return "\n".join(described)


def step_table(time: StepTime) -> str:
    """Format the parts of a step in seconds."""
    parts = [(field.name.replace("_", " "), getattr(time, field.name)) for field in fields(time)]
    rows = [["step, s", ""], *([name, f"{value:.4f}"] for name, value in parts if value)]
    return aligned([*rows, ["total", f"{time.total:.4f}"]])


def ledger_table(stage: str, exchanges: Sequence[Exchange]) -> str:
    """Format the bytes that a rank of a stage exchanges per step."""
    rows = [
        (exchange.axis, exchange.collective, f"{exchange.num_bytes / MIB:,.3f}", exchange.content)
        for exchange in exchanges
    ]
    total = sum(exchange.num_bytes for exchange in exchanges) / MIB
    header = (f"{stage} stage, per rank and step", "collective", "MiB", "content")
    return aligned([header, *rows, ("total", "", f"{total:,.3f}", "")])


# Output of `plan`: the answer in one line, the ranked table, and why the others are not chosen.


PUBLIC = "constants fitted to public runs, none measured here"
COLUMNS = (
    "strategy", "sizes", "rows x forwards", "recompute", "tokens/s", "step s", "80 %", "memory GiB", "80 %", "verdict",
    "largest line",
)  # fmt: skip


def sizes(job: Job) -> str:
    """Name the parallel sizes, from the outermost to the innermost: `pp 2, dp 4`, `dp 2 x 8` for two replicas.

    hpZ's second copies of the weights are written like replicas, and `tp 4 (sequence)` is sequence-parallel, too.
    """
    dims = job.dims
    replicas = dims.dp * dims.cp // job.shard if job.zero else 1
    if job.strategy.secondary_partition > 1:
        replicas = dims.dp // job.strategy.secondary_partition
    data = f"dp {replicas} x {dims.dp // replicas}" if 1 < replicas < dims.dp else f"dp {dims.dp}"
    experts = f"ep {dims.ep}" if dims.ep > 1 else ""
    others = {axis: getattr(job.dims, axis) for axis in ("pp", "cp", "tp")}
    named = {axis: f"{axis} {size}" if size > 1 else "" for axis, size in others.items()}
    named["tp"] += " (sequence)" if job.strategy.tp_sequence_parallel else ""
    return ", ".join(filter(None, [named["pp"], data, experts, named["cp"], named["tp"]]))


def batch(job: Job) -> str:
    return f"{job.micro_batch} x {job.grad_accum}"


def rate(tokens_per_s: float) -> str:
    """Format a speed: whole tokens, or two digits of a slow one."""
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2g}"


def answer(best: Choice, others: int) -> str:
    """Format the answer: strategy, sizes, tokens/s, step time and memory, each with its 80 % interval.

    Args:
        others: number of choices that are as fast as this one, as far as can be predicted.
    """
    assert best.job and best.prediction
    job, prediction = best.job, best.prediction
    slow, fast = best.tokens_per_s_interval
    low, high = prediction.seconds_interval
    least, most = prediction.total_interval
    shape = f"{sizes(job)}, micro-batch {batch(job)}, recompute {job.checkpointing}"
    speed = f"{rate(best.tokens_per_s)} tokens/s ({rate(slow)} to {rate(fast)})"
    shown = short_seconds
    step = f"a step in {shown(prediction.seconds)} s ({shown(low)} to {shown(high)})"
    held = f"{prediction.total_memory_gib:.1f} of {job.memory_gib:.1f} GiB ({least:.1f} to {most:.1f})"
    if job.offloads:
        origin = " (assumed)" if job.assumes_host else ""
        needed = f"{memory.offloaded_gib(job):,.0f} of {job.host.memory_gib:,.0f} GiB"
        held = f"{held}, {needed} of host memory per node{origin}"
    learnt = job.calibration
    origin = f"80 % intervals; {learnt.describe() if learnt else PUBLIC}"
    idle = f"; {best.idle_ranks:,} of {job.dims.dp:,} data-parallel ranks get no row" if best.idle_ranks else ""
    ties = f"; {others} more {'is a tie' if others == 1 else 'are ties'}" if others else ""
    machines = f"{job.dims.world_size} x {job.gpu_kind}"
    return f"{best.name} ({shape}) on {machines}: {speed}, {step}, {held}, {best.verdict} ({origin}{idle}{ties})"


def job_size(request: PlanRequest) -> str:
    """Format what is trained in a step: `109.5 million parameters, 64 rows of 2048 tokens per step`."""
    batch = request.batch
    many = f"{request.sequences} x " if request.sequences > 1 else ""
    rows = f"{batch.global_batch_size} rows of {many}{batch.sequence_length} tokens per step"
    trained = request.shape.parameters * request.frozen.trained / 1e6 if request.frozen else 0
    more = f" and {trained:,.1f} million of an adapter" if trained else ""
    more += f", a teacher of {request.teacher.parameters / 1e6:,.1f} million" if request.teacher else ""
    return f"{request.shape.parameters / 1e6:,.1f} million parameters{more}, {rows}"


def at_most(count: int, choices: Sequence[Choice]) -> list[Choice]:
    """Keep the first sizes of each strategy."""
    kept: list[Choice] = []
    for choice in choices:
        if sum(other.name == choice.name for other in kept) < count:
            kept.append(choice)
    return kept


def table(choices: Sequence[Choice]) -> str:
    rows: list[Sequence[str]] = [COLUMNS]
    for choice in choices:
        assert choice.prediction and choice.job
        prediction = choice.prediction
        low, high = map(_step_seconds, prediction.seconds_interval)
        least, most = prediction.total_interval
        verdict = f"{choice.verdict}{', tie' if choice.tie else ''}"
        rows.append([
            choice.name, sizes(choice.job), batch(choice.job), choice.job.checkpointing,
            rate(choice.tokens_per_s), _step_seconds(prediction.seconds), f"{low}-{high}",
            f"{prediction.total_memory_gib:.1f}", f"{least:.1f}-{most:.1f}", verdict, prediction.binding,
        ])  # fmt: skip
    return aligned(rows)


def _step_seconds(value: float) -> str:
    """Format for a column: comparable down to milliseconds, also where a step takes hours."""
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"


def rejection(choice: Choice, helps: str) -> str:
    """Say in one line why a strategy is out: its largest line of memory, and what helps; or why it cannot run."""
    if not (choice.job and choice.prediction):
        return f"{choice.name}: {choice.reason}"
    fullest = max(memory.anatomy(choice.job), key=lambda rank_class: rank_class.peak)
    line = next(candidate for candidate in fullest.lines if candidate.name == fullest.binding)
    largest = f"{fullest.binding} {getattr(line, fullest.moment) / GIB:.0f}"
    needed = f"{choice.prediction.total_memory_gib:.0f} GiB of {choice.job.memory_gib:.0f}"
    return f"{choice.name} ({sizes(choice.job)}): {needed}, {largest}; {helps}"


def record(choice: Choice) -> dict:
    """Return the choice as JSON.

    `peak_memory_gib` is all that the fullest GPU holds, by which `verdict` judges. In `plan --runs` and run.json the
    key is what a counter shows, by default torch_allocated: tensors alone.
    """
    if not (choice.job and choice.prediction):
        return {"strategy": choice.name, "verdict": choice.verdict, "reason": choice.reason}
    job, prediction = choice.job, choice.prediction
    dims = job.dims
    return {
        "strategy": choice.name,
        "sizes": {"shard": job.shard} | {axis: getattr(dims, axis) for axis in ("dp", "tp", "pp", "cp", "ep")},
        "tp_sequence_parallel": job.strategy.tp_sequence_parallel,
        "zero_hpz_partition_size": job.strategy.secondary_partition,
        "micro_batch_size": job.micro_batch,
        "accumulation_steps": job.grad_accum,
        "activation_checkpointing": job.checkpointing,
        "tokens_per_second": choice.tokens_per_s,
        "tokens_per_second_interval": choice.tokens_per_s_interval,
        "step_seconds": prediction.seconds,
        "step_seconds_interval": prediction.seconds_interval,
        "peak_memory_gib": prediction.total_memory_gib,
        "peak_memory_gib_interval": prediction.total_interval,
        "verdict": choice.verdict,
        "tie": choice.tie,
        "binding": prediction.binding,
        "ledger": {stage: [asdict(exchange) for exchange in listed] for stage, listed in ledger.ledgers(job).items()},
    }


def inputs_line(machines: Cluster, job: Job | None) -> str:
    """Say in one line which rates a plan rests on, and where they come from.

    Args:
        job: of the answer, None if nothing can run.
    """
    card, learnt, (inner, *outer) = machines.card, machines.calibration, machines.levels
    origin = "measured elsewhere" if card.is_measured else f"{hardware.MEASURED_SHARE:g} of the data sheet"
    rates = [f"products {card.matmul_tflops:,.4g} TFLOP/s ({origin})", f"GPU memory {card.hbm_gb_per_s:,.4g} GB/s"]
    rates.append(f"links in a node {inner.measured[-1][1]:,.4g} GB/s")
    for level in outer if machines.nodes > 1 else ():
        rate, unit = (level.measured[-1][1], "GB/s") if level.measured else (level.node_gbit, "Gbit/s of a node")
        rates.append(f"{level.name} {rate:,.4g} {unit}")
    source = memory.reserved(job)[1] if job else "assumed"
    factors = "; all of these times the factors of a calibration" if learnt and (learnt.time or learnt.memory) else ""
    return f"Inputs: {', '.join(rates)}; memory beside tensors ({source}); efficiencies and latencies (fitted){factors}"
