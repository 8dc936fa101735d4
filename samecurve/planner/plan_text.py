"""Output of `plan`: the answer in one line, the ranked table, and why the others are not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from samecurve.planner import ledger, memory, printing, space
from samecurve.planner.job import Job
from samecurve.planner.layout import Layout
from samecurve.planner.search import Choice
from samecurve.planner.shape import ModelShape
from samecurve.planner.wanted import Wanted

PUBLIC = "constants fitted to public runs, none measured here"
COLUMNS = (
    "strategy", "sizes", "rows x forwards", "recompute", "tokens/s", "step s", "80 %", "memory GiB", "80 %", "verdict",
    "largest line",
)  # fmt: skip


def sizes(layout: Layout) -> str:
    """Name the parallel sizes, from the outermost to the innermost: `pp 2, dp 4`, `dp 2 x 8` for two replicas.

    hpZ's second copies of the weights are written like replicas, and `tp 4 (sequence)` is sequence-parallel, too.
    """
    replicas = layout.dp // layout.shard if layout.zero else 1
    if layout.secondary > 1:
        replicas = layout.dp // layout.secondary
    data = f"dp {replicas} x {layout.dp // replicas}" if 1 < replicas < layout.dp else f"dp {layout.dp}"
    experts = f"ep {layout.ep}" if layout.ep > 1 else ""
    others = {axis: getattr(layout, axis) for axis in ("pp", "cp", "tp")}
    named = {axis: f"{axis} {size}" if size > 1 else "" for axis, size in others.items()}
    named["tp"] += " (sequence)" if layout.sequence_parallel else ""
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
    assert best.job and best.found
    job, found = best.job, best.found
    slow, fast = best.tokens_per_s_interval
    low, high = found.seconds_interval
    least, most = best.memory_interval
    shape = f"{sizes(job.layout)}, micro-batch {batch(job)}, recompute {job.checkpointing}"
    speed = f"{rate(best.tokens_per_s)} tokens/s ({rate(slow)} to {rate(fast)})"
    shown = printing.seconds
    step = f"a step in {shown(found.seconds)} s ({shown(low)} to {shown(high)})"
    held = f"{found.total_memory_gib:.1f} of {job.memory_gib:.1f} GiB ({least:.1f} to {most:.1f}), {best.verdict}"
    learnt = job.calibration
    origin = f"80 % intervals; {learnt.describe() if learnt else PUBLIC}"
    idle = f"; {best.idle_ranks:,} of {job.layout.dp:,} data-parallel ranks get no row" if best.idle_ranks else ""
    ties = f"; {others} more {'is a tie' if others == 1 else 'are ties'}" if others else ""
    return (
        f"{best.name} ({shape}) on {job.layout.gpus} x {job.gpu_kind}: {speed}, {step}, {held} ({origin}{idle}{ties})"
    )


def job_size(wanted: Wanted) -> str:
    """Format what is trained in a step: `109.5 million parameters, 64 rows of 2048 tokens per step`."""
    batch = wanted.batch
    rows = f"{batch.global_batch_size} rows of {batch.sequence_length} tokens per step"
    return f"{wanted.shape.parameters / 1e6:,.1f} million parameters, {rows}"


def at_most(count: int, choices: Sequence[Choice]) -> list[Choice]:
    """Keep the first sizes of each strategy."""
    kept: list[Choice] = []
    for each in choices:
        if sum(other.name == each.name for other in kept) < count:
            kept.append(each)
    return kept


def table(choices: Sequence[Choice]) -> str:
    return printing.table([COLUMNS, *map(_row, choices)])


def _row(choice: Choice) -> list[str]:
    assert choice.found and choice.job
    found = choice.found
    low, high = map(_step_seconds, found.seconds_interval)
    least, most = choice.memory_interval
    verdict = f"{choice.verdict}{', tie' if choice.tie else ''}"
    # a choice without files is named after the axes that this version cannot run together
    lack = f"needs {choice.name.replace('+', ' + ')}" if choice.lack else ""
    return [
        choice.name, sizes(choice.job.layout), batch(choice.job), choice.job.checkpointing,
        rate(choice.tokens_per_s), _step_seconds(found.seconds), f"{low}-{high}",
        f"{found.total_memory_gib:.1f}", f"{least:.1f}-{most:.1f}", lack or verdict, found.binding,
    ]  # fmt: skip


def _step_seconds(value: float) -> str:
    """Format for a column: comparable down to milliseconds, also where a step takes hours."""
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"


def legend(lacking: Sequence[Choice]) -> str:
    """Explain what the verdicts of shapes that this version cannot run say."""
    used = dict.fromkeys(axis for each in lacking for axis in each.name.split("+"))
    named = ", ".join(f"{axis}: {space.AXIS_NAMES[axis]}" for axis in used)
    return f"needs: axes that no file in configs/ has, or has together ({named})"


def rejection(choice: Choice, more: tuple[Choice, str] | None) -> str:
    """Say in one line why a family of strategies is out, and on how many GPUs it would fit.

    Args:
        more: the choice on the fewest GPUs on which it does, and what else has to change (`remedies.more_gpus`).
    """
    if not (choice.job and choice.found):
        return f"{choice.name}: {choice.reason}"
    fullest = max(memory.anatomy(choice.job), key=lambda each: each.peak)
    line = next(each for each in fullest.lines if each.name == fullest.binding)
    held = getattr(line, fullest.moment) / memory.GIB
    helps = f"it {elsewhere(more)}" if more else "more GPUs do not help"
    return (
        f"{choice.name} ({sizes(choice.job.layout)}): {choice.found.total_memory_gib:.0f} GiB of "
        f"{choice.job.memory_gib:.0f}, {fullest.binding} {held:.0f}; {helps}"
    )


def elsewhere(more: tuple[Choice, str]) -> str:
    """Say on how many GPUs a choice of `remedies.more_gpus` fits, or is tight, and what else has to change."""
    choice, changed = more
    assert choice.job
    return f"{'fits' if choice.verdict == 'fits' else 'is tight'} on {choice.job.layout.gpus} GPUs{changed}"


def record(choice: Choice) -> dict:
    """Return the choice as JSON.

    `peak_memory_gib` is all that the fullest GPU holds, by which `verdict` judges. In `plan --runs` and run.json the
    key is what a counter shows, by default torch_allocated: tensors alone.
    """
    if not (choice.job and choice.found):
        return {"strategy": choice.name, "verdict": choice.verdict, "reason": choice.reason}
    job, found = choice.job, choice.found
    layout = job.layout
    # The model's own FLOPs, without recomputed ones: their share of the data sheet's peak is the MFU.
    model_flops = step_flops(job.shape, choice.tokens / job.seq, job.seq)
    exchanges = {} if choice.lack else ledger.ledgers(job)  # it knows only what this version runs
    return {
        "strategy": choice.name,
        "sizes": {axis: getattr(layout, axis) for axis in ("dp", "shard", "tp", "pp", "cp", "ep")},
        "tp_sequence_parallel": layout.sequence_parallel,
        "zero_hpz_partition_size": layout.secondary,
        "micro_batch_size": job.micro_batch,
        "accumulation_steps": job.grad_accum,
        "activation_checkpointing": job.checkpointing,
        "tokens_per_second": choice.tokens_per_s,
        "tokens_per_second_interval": choice.tokens_per_s_interval,
        "tflops_per_gpu": model_flops / (found.seconds * layout.gpus * 1e12),
        "step_seconds": found.seconds,
        "step_seconds_interval": found.seconds_interval,
        "peak_memory_gib": found.total_memory_gib,
        "peak_memory_gib_interval": choice.memory_interval,
        "verdict": choice.verdict,
        "tie": choice.tie,
        "binding": found.binding,
        "not_in_this_version": choice.lack or None,
        "ledger": {stage: [asdict(each) for each in listed] for stage, listed in exchanges.items()},
    }


# FLOPs of a model: 2 per multiplied weight and token forward, 4 s a between tokens, and twice that backward, which
# computes two products for each one of the forward. Without the mask's half, as is the custom.


def layer_flops(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the FLOPs of one layer's forward: 24 B s h^2 + 4 B s^2 h in a GPT, which is all of inference."""
    tokens = rows * seq
    return 2 * tokens * shape.active_layer_parameters + attention_flops(shape, rows, seq)


def attention_flops(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the FLOPs between tokens in one layer's forward: scores and weighted values, 4 B s^2 a."""
    return 4 * rows * seq**2 * shape.attention_width


def step_flops(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the model's FLOPs of a training step, of which MFU is a share (arXiv:2205.05198, equation 8)."""
    return 3 * (shape.layers * layer_flops(shape, rows, seq) + 2 * rows * seq * shape.head_parameters)
