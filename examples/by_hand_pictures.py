"""The pictures of docs/by_hand.md: who holds what on two ranks, and the timetables of the pipeline schedules.

The timetables are those of by_hand/pipeline_schedules.py. Colors follow the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable

from by_hand import pipeline_schedules

# What a rank of two holds of each tensor, and what travels.
WHOLE, ROWS, COLUMNS, ON_0, ON_1 = "whole", "rows", "columns", "on rank 0", "on rank 1"
LESSONS: dict[str, tuple[dict[str, str], str]] = {
    "data parallel": (
        {"weights": WHOLE, "gradients": WHOLE, "moments": WHOLE, "batch": ROWS},
        "gradients: all-reduce",
    ),
    "ZeRO-1": (
        {"weights": WHOLE, "gradients": WHOLE, "moments": ROWS, "batch": ROWS},
        "gradients: reduce-scatter|weights: all-gather",
    ),
    "ZeRO-3": (
        {"weights": ROWS, "gradients": ROWS, "moments": ROWS, "batch": ROWS},
        "weights: 2 all-gathers|gradients: reduce-scatter",
    ),
    "tensor parallel": (
        {"A": COLUMNS, "B": ROWS, "bias b": WHOLE, "tokens": WHOLE},
        "tokens: 2 all-reduces (f, g)",
    ),
    "sequence parallel": (
        {"A": COLUMNS, "B": ROWS, "bias b": WHOLE, "tokens": ROWS},
        "tokens: 2 all-gathers,|2 reduce-scatters",
    ),
    "pipeline": (
        {"layer 0": ON_0, "layer 1": ON_1, "input": ON_0, "target": ON_1},
        "micro-batches forward,|their gradients back",
    ),
    "ring attention": (
        {"queries": ROWS, "keys": ROWS, "values": ROWS, "output": ROWS},
        "k and v around the ring,|then dk and dv with them",
    ),
    "expert dispatch": (
        {"router": WHOLE, "experts": ROWS, "tokens": ROWS, "output": ROWS},
        "tokens: all-to-all|there and back",
    ),
}
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.page { fill: #ffffff }
.rank { fill: none; stroke: #8c959f }
.absent { fill: none; stroke: #afb8c1; stroke-dasharray: 3 3 }
.held0, .f { fill: #54aeff }
.held1, .b { fill: #fa9a4b }
.w { fill: #6bc46d }
.cell { fill: #0d1117; font-size: 11px; text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.small { fill: #9198a1 }
.page { fill: #0d1117 }
.rank { stroke: #6e7681 }
.absent { stroke: #484f58 }
.cell { fill: #0d1117 }
}
</style>"""
SIDE = 48  # of the square that stands for a tensor


def svg(width: int, height: int, title: str, body: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<title>{title}</title>", STYLE, page, *body, "</svg>", ""])


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str, radius: int = 0) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{style}"/>'


def held(cut: str, rank: int) -> tuple[float, float, float, float] | None:
    """Return (x, y, width, height) of the part that a rank holds, as shares of the square; None for nothing."""
    if cut in (ON_0, ON_1):
        cut = WHOLE if cut == f"on rank {rank}" else ""
    parts = {WHOLE: (0, 0, 1, 1), ROWS: (0, rank / 2, 1, 1 / 2), COLUMNS: (rank / 2, 0, 1 / 2, 1)}
    return parts.get(cut)


def holdings() -> str:
    body, height = [], 104
    for nth, (lesson, (tensors, travels)) in enumerate(LESSONS.items()):
        top = 16 + nth * height
        body.append(text(16, top + 40, lesson, "title"))
        for rank in range(2):
            left = 150 + rank * 320
            body += [box(left, top, 304, height - 14, "rank", 6), text(left + 8, top + 16, f"rank {rank}", "small")]
            for place, (name, cut) in enumerate(tensors.items()):
                x, y = left + 16 + place * 72, top + 22
                body.append(box(x, y, SIDE, SIDE, "absent"))
                if part := held(cut, rank):
                    dx, dy, width, tall = (SIDE * share for share in part)
                    body.append(box(x + dx, y + dy, width, tall, f"held{rank}"))
                body.append(text(x + SIDE / 2, y + SIDE + 14, name, "small", "middle"))
        body += [text(790, top + 40 + 17 * line, words) for line, words in enumerate(travels.split("|"))]
    return svg(980, 16 + len(LESSONS) * height, "Who holds what on two ranks", body)


def schedules(stages: int = 4, micro_batches: int = 6) -> str:
    body, top, side = [], 8, 26
    tables = {name: pipeline_schedules.timetable(name, stages, micro_batches) for name in pipeline_schedules.SCHEDULES}
    for name, table in tables.items():
        idle = 100 * pipeline_schedules.idle_share(table)
        body.append(text(16, top + 18, f"{name}: {len(table[0])} units of time, {idle:.0f} % idle", "title"))
        for stage, row in enumerate(table):
            y = top + 28 + stage * side
            body.append(text(16, y + 17, f"stage {stage}", "small"))
            for time, work in enumerate(row):
                x = 70 + time * side
                idle_cell = box(x, y, side - 2, side - 2, "absent")
                shown = [box(x, y, side - 2, side - 2, work[0].lower()), text(x + side / 2 - 1, y + 16, work, "cell")]
                body += [idle_cell] if work == "--" else shown
        top += 44 + stages * side
    width = 86 + side * max(len(row) for table in tables.values() for row in table)
    return svg(width, top, "Timetables of three pipeline schedules", body)
