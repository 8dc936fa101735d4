"""A simulated step as a timeline, as text and as SVG, and what failures leave of the time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from samecurve.config.schema import Checkpoint
from samecurve.planner import goodput, simulation, step_time
from samecurve.planner.cluster import Cluster
from samecurve.planner.events import Lane, Task
from samecurve.planner.goodput import Failures
from samecurve.planner.job import Job
from samecurve.planner.simulation import Simulated

COLUMNS, SHOWN_RANKS = 100, 8
KINDS = {
    "F": ("forward", "#9fc5e8"),
    "B": ("backward", "#93c47d"),
    "I": ("input gradients", "#93c47d"),
    "W": ("weight gradients", "#d9ead3"),
    "G": ("gather weights", "#ffd966"),
    "R": ("reduce gradients", "#e69138"),
    "U": ("update, host", "#b4a7d6"),
}
WIDTH, LABEL, ROW, GAP = 1000, 150, 18, 4  # pixels
CHECKPOINT_BYTES = 12  # per parameter: fp32 weights and Adam's two states
SIMULATED_FAILURES = 20_000
MINUTE, HOUR = 60, 3600


def report(job: Job, machines: Cluster, checkpoint: Checkpoint) -> tuple[str, str]:
    """Simulate a step and failures.

    Args:
        checkpoint: of the recipe.

    Returns:
        The text, and the timeline as SVG.
    """
    own = machines.reliability
    formula = step_time.breakdown(job).total
    healthy = simulation.simulate(job)
    lines = [f"Simulated step: {healthy.seconds:.3g} s, by the formulas {formula:.3g} s"]
    shown = healthy
    if own.slow_nodes:
        shown = simulation.simulate(job, own.slow_factor)
        longer = shown.seconds / healthy.seconds - 1
        lines.append(f"A node that takes {own.slow_factor:g} x as long: {shown.seconds:.3g} s, {longer:.1%} longer")
    background = checkpoint.background is not False
    lines += [text(shown), "", *_failure_lines(job, machines, shown.seconds, checkpoint.every_steps, background)]
    return "\n".join(lines), svg(shown)


def expected_failures(job: Job, machines: Cluster, background: bool) -> tuple[Failures, float]:
    """Describe a job's failures, and the seconds in which a checkpoint is written.

    In the background, training waits for the copy to host memory only; a failure also loses the steps since the copy
    that was written last, which the restart repeats.
    """
    own, nodes = machines.reliability, machines.nodes
    state = CHECKPOINT_BYTES * job.shape.parameters / nodes / 1e9
    written = state / own.checkpoint_gb_per_s_per_node
    copied = state / (machines.host.pcie_gb_per_s * machines.gpus_per_node)
    wait, late = (copied, written) if background else (written, 0.0)
    return Failures(own.node_mtbf_hours * HOUR / nodes, wait, own.restart_seconds + late), written


def _failure_lines(job: Job, machines: Cluster, step: float, every_steps: int, background: bool) -> list[str]:
    failures, written = expected_failures(job, machines, background)
    named = {name: _duration(getattr(failures, name)) for name in ("mean_between", "checkpoint", "restart")}
    # a save waits until the one before is written (checkpoint/manager.py)
    shortest = written if background else 0.0
    best, daly, young = (_duration(seconds) for seconds in (failures.best, failures.daly, failures.young))
    hours = f"{machines.reliability.node_mtbf_hours:,.0f} h"
    found = [
        f"Failures: one in {named['mean_between']} (nodes: {machines.nodes:,}, each after {hours} on average)",
        f"Training waits {named['checkpoint']} for a checkpoint, which is written in {_duration(written)}, and "
        f"{named['restart']} for a restart",
        f"Best time between checkpoints: {best} (Daly's estimate {daly}, Young's {young})",
    ]
    for name, steps in (("best", max(1, round(max(failures.best, shortest) / step))), ("recipe", every_steps)):
        if steps:
            share = failures.goodput(steps * step)
            simulated = goodput.simulate(failures, steps * step, SIMULATED_FAILURES)
            found.append(
                f"checkpoint.every_steps={steps} ({name}): goodput {share:.1%}, {simulated:.1%} over "
                f"{SIMULATED_FAILURES:,} simulated failures"
            )
    return found if every_steps else [*found, "checkpoint.every_steps=0 (recipe): a failure loses all work"]


def _duration(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:.2g} s"
    if seconds < HOUR:
        return f"{seconds / MINUTE:.3g} min"
    return f"{seconds / HOUR:,.3g} h" if seconds < 100 * HOUR else f"{seconds / HOUR:,.0f} h"


def shown_lanes(simulated: Simulated) -> list[Lane]:
    """List the lanes to draw: of many ranks the first ones and the last, compute above network."""
    ranks = sorted({lane.rank for lane in simulated.lanes})
    few = ranks if len(ranks) <= SHOWN_RANKS else [*ranks[: SHOWN_RANKS - 1], ranks[-1]]
    return sorted(lane for lane in simulated.lanes if lane.rank in few)


def _name(lane: Lane, simulated: Simulated) -> str:
    staged = len({each.rank for each in simulated.lanes}) > 1
    return " ".join(filter(None, [lane.replica, f"rank {lane.rank}" if staged else "", lane.resource]))


def text(simulated: Simulated) -> str:
    """Draw the lanes as lines; each column is what fills most of its time."""
    lanes = shown_lanes(simulated)
    names = [_name(lane, simulated) for lane in lanes]
    rows = [
        f"{name.ljust(max(map(len, names)))} |{_line(simulated.lanes[lane], simulated.seconds)}| "
        f"{simulated.idle_share(lane):4.0%} idle"
        for name, lane in zip(names, lanes, strict=True)
    ]
    used = {task.kind for lane in lanes for task in simulated.lanes[lane]}
    legend = ", ".join(f"{kind} {KINDS[kind][0]}" for kind in KINDS if kind in used)
    return "\n".join([*rows, f"{COLUMNS} columns of {simulated.seconds / COLUMNS:.3g} s: {legend}, . idle"])


def _line(tasks: Sequence[Task], whole: float) -> str:
    filled: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    width = whole / COLUMNS
    for task in tasks:
        column = min(int(task.start / width), COLUMNS - 1)
        while column < COLUMNS and column * width < task.end:
            share = min(task.end, (column + 1) * width) - max(task.start, column * width)
            filled[column][task.kind] = filled[column].get(task.kind, 0.0) + max(share, 0.0)
            column += 1
    return "".join(_letter(shares, width) for shares in filled)


def _letter(shares: dict[str, float], width: float) -> str:
    idle = width - sum(shares.values())
    most = max(shares, key=lambda kind: shares[kind], default=".")
    return most if shares and shares[most] >= idle else "."


def svg(simulated: Simulated) -> str:
    """Draw the lanes as SVG, a rectangle for each task."""
    lanes = shown_lanes(simulated)
    scale, body = WIDTH / simulated.seconds, []
    for row, lane in enumerate(lanes):
        top = GAP + row * (ROW + GAP)
        body.append(f'<text x="{GAP}" y="{top + 13}">{escape(_name(lane, simulated))}</text>')
        for task in simulated.lanes[lane]:
            left, width = LABEL + task.start * scale, task.seconds * scale
            name = f"{KINDS[task.kind][0]} {task.label}".strip()
            body.append(
                f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{KINDS[task.kind][1]}" '
                f'stroke="#666" stroke-width="0.3"><title>{name}: {task.start:.4g} to {task.end:.4g} s</title></rect>'
            )
    bottom = GAP + len(lanes) * (ROW + GAP) + 14
    body.append(f'<text x="{LABEL}" y="{bottom}">0 s</text>')
    body.append(f'<text x="{LABEL + WIDTH}" y="{bottom}" text-anchor="end">{simulated.seconds:.3g} s</text>')
    size = f'width="{LABEL + WIDTH + GAP}" height="{bottom + GAP}" viewBox="0 0 {LABEL + WIDTH + GAP} {bottom + GAP}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">'
    return "\n".join([head, *body, "</svg>", ""])
