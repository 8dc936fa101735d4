"""A picture of a layout, as text and as SVG: nodes as boxes, and what every GPU of them is."""

from __future__ import annotations

from html import escape

from samecurve.planner.job import Job
from samecurve.planner.layout import ORDER
from samecurve.planner.placement import Groups, Order, axes, cell, complaints, groups, in_common, ranks_of, uneven_rows

SHOWN_NODES = 12
CELL, GAP, LABEL, LINE = 46, 6, 90, 30  # pixels
COLOURS = ("#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#fce5cd", "#d0e0e3", "#ead1dc")


def shown_nodes(count: int) -> list[int]:
    """Choose the nodes to draw: all, or the first ones and the last."""
    return list(range(count)) if count <= SHOWN_NODES else [*range(SHOWN_NODES - 1), count - 1]


def text(job: Job, global_batch: int, order: Order = ORDER) -> str:
    """Draw nodes, groups and what is wrong. Many nodes are folded."""
    nodes = shown_nodes(-(-job.layout.gpus // job.gpus_per_node))
    lines = [f"Ranks vary first in {', then in '.join(each.name for each in axes(job, order)) or 'nothing'}"]
    width = max(len(cell(job, rank, order)) for node in nodes for rank in ranks_of(job, node))
    before = -1
    for node in nodes:
        if node != before + 1:
            lines.append(f"... {node - before - 1} more nodes in the same order")
        cells = " ".join(cell(job, rank, order).ljust(width) for rank in ranks_of(job, node))
        lines.append(f"node {node:<5}| {cells} |  {in_common(job, node, order)}".rstrip())
        before = node
    lines += [_group_line(each) for each in groups(job, order)]
    found = [*complaints(job, order), *uneven_rows(global_batch, job)]
    return "\n".join([*lines, *(f"attention: {each}" for each in found)])


def _group_line(each: Groups) -> str:
    where = "inside a node" if each.nodes == 1 else f"over {each.nodes} nodes"
    if each.axis == "pp":
        where += f", neighbours {each.stride} ranks apart"
    first = ", ".join(map(str, each.first[:4])) + (", ..." if each.size > 4 else "")
    rate = f"{each.link.bus_gb_per_s:.0f} GB/s per rank over the {each.link.level}"
    return f"{each.axis} {each.size}: {where}, {rate}; the first group is ranks {first}"


def svg(job: Job, global_batch: int, order: Order = ORDER) -> str:
    """Draw the same as SVG; GPUs with one index in the outermost axis have one colour."""
    nodes, body, top = shown_nodes(-(-job.layout.gpus // job.gpus_per_node)), [], GAP
    outermost = axes(job, order)[-1:]
    for row, node in enumerate(nodes):
        if row and node != nodes[row - 1] + 1:
            body.append(_label(GAP, top + 18, f"... {node - nodes[row - 1] - 1} more nodes in the same order"))
            top += LINE
        ranks = ranks_of(job, node)
        body.append(_label(GAP, top + 20, f"node {node}"))
        width = len(ranks) * CELL + GAP
        body.append(f'<rect x="{LABEL}" y="{top}" width="{width}" height="{LINE}" fill="none" stroke="#666"/>')
        for index, rank in enumerate(ranks):
            colour = COLOURS[sum(each.index(rank) for each in outermost) % len(COLOURS)]
            left = LABEL + GAP / 2 + index * CELL
            box = f'x="{left}" y="{top + 3}" width="{CELL - 2}" height="{LINE - 6}" fill="{colour}"'
            body.append(f"<rect {box}><title>rank {rank}</title></rect>")
            body.append(_label(left + 4, top + 19, cell(job, rank, order)))
        body.append(_label(LABEL + width + GAP, top + 20, in_common(job, node, order)))
        top += LINE + GAP
    notes = [_group_line(each) for each in groups(job, order)]
    notes += [f"attention: {each}" for each in [*complaints(job, order), *uneven_rows(global_batch, job)]]
    for note in notes:
        body.append(_label(GAP, top + 18, note))
        top += 20
    # a character of this font is about 7 pixels wide
    width = max(LABEL + job.gpus_per_node * CELL + 260, 7 * max(map(len, notes), default=0) + 2 * GAP)
    height = top + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join([f'{head} font-family="monospace" font-size="11">', *body, "</svg>", ""])


def _label(left: float, bottom: float, words: str) -> str:
    return f'<text x="{left}" y="{bottom}">{escape(words)}</text>'
