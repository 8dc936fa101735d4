"""Rules of thumb for a model's dimensions on a GPU: what divides, and how well tiles fill matrices and processors.

A product of (rows, inputs) x (inputs, outputs) is computed in tiles of the result, one per streaming multiprocessor
(SM) at a time. Tiles that reach beyond the edge compute nothing of use, and the last wave of tiles leaves SMs idle:
109 tiles on 108 SMs take as long as 216 (NVIDIA, "Matrix Multiplication Background User's Guide"). The library chooses
among several tile sizes, so that these shares are estimates for the largest one; `bench matmul` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from samecurve.planner.job import Job

MULTIPLE = 64  # elements of 2 bytes: 128 bytes, which tensor cores want in each dimension of A100 and later
TILE_ROWS, TILE_COLUMNS = 128, 256
ASSUMED_SMS = 108  # of an A100
GOOD = 0.9  # efficiencies below are worth telling


@dataclass(frozen=True)
class Product:
    """One matrix product of the forward pass on one rank: (rows, inputs) x (inputs, outputs).

    Attributes:
        sms: streaming multiprocessors of the GPU.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    sms: int

    @property
    def tiles(self) -> int:
        return math.ceil(self.rows / TILE_ROWS) * math.ceil(self.outputs / TILE_COLUMNS)

    @property
    def waves(self) -> int:
        return math.ceil(self.tiles / self.sms)

    @property
    def tile_efficiency(self) -> float:
        """Share of the tiles' area that belongs to the result."""
        return self.rows * self.outputs / (self.tiles * TILE_ROWS * TILE_COLUMNS)

    @property
    def wave_efficiency(self) -> float:
        """Share of the SMs that work, over all waves."""
        return self.tiles / (self.waves * self.sms)


def _sms(job: Job) -> int:
    """Return the streaming multiprocessors of a job's GPU, those of an A100 where they are not known."""
    return job.card.sms or ASSUMED_SMS


def title(job: Job) -> str:
    """Say what the dimensions are judged for, and what is assumed about it."""
    if _has_no_tiles(job):
        return f"Shapes on {job.gpu_kind}, whose products have no tiles:"
    assumed = "" if job.card.sms else ", assumed as of an A100"
    return f"Shapes on {job.gpu_kind} with {_sms(job)} SMs{assumed}:"


def _has_no_tiles(job: Job) -> bool:
    return job.card.generation == "cpu"


def products(job: Job) -> list[Product]:
    """List the products of a layer, and the output head's."""
    shape, split, count = job.shape, job.dims.tp, _sms(job)
    shared = job.dims.ep if shape.experts else 1  # ranks whose tokens an expert gets
    rows = int(job.tokens * shared * max(shape.top_k, 1) / max(shape.experts, 1)) or 1
    tokens, hidden = int(job.tokens), shape.hidden
    head = shape.attention_width // shape.heads
    inner, queries = shape.ffn // job.mlp_split, shape.attention_width // split
    keys = 2 * head * shape.kv_heads // split
    return [
        Product("query, key, value", tokens, hidden, queries + keys, count),
        Product("attention output", tokens, queries, hidden, count),
        Product("gate and up" if shape.gated else "up", rows, hidden, inner * (2 if shape.gated else 1), count),
        Product("down", rows, inner, hidden, count),
        Product("output head", tokens, hidden, shape.vocab // split, count),
    ]


def near_width(width: int, multiple: int = MULTIPLE) -> int:
    """Return the nearest multiple, the larger of two that are as near."""
    return max(math.floor(width / multiple + 0.5), 1) * multiple


def swiglu_width(hidden: int, multiple: int = MULTIPLE) -> int:
    """Return the width of a gated MLP with as many weights as 4 h without a gate, 8/3 h (arXiv:2002.05202)."""
    return near_width(8 * hidden // 3, multiple)


def padded(size: int, multiple: int = MULTIPLE) -> int:
    """Return the next multiple, for a vocabulary, which cannot be made smaller."""
    return -(-size // multiple) * multiple


def complaints(job: Job) -> list[str]:
    """Say which dimensions do not divide, with the nearest ones that do, and which products fill the GPU badly."""
    told = [*_indivisible(job)]
    for product in [] if _has_no_tiles(job) else products(job):
        if product.waves > 1 and product.wave_efficiency < GOOD:
            waves = f"{product.tiles} tiles on {product.sms} SMs need {product.waves} waves"
            told.append(f"{product.name}: {waves}, {product.wave_efficiency:.0%} full")
        if product.tile_efficiency < GOOD:
            told.append(f"{product.name}: tiles of {TILE_ROWS} x {TILE_COLUMNS} are {product.tile_efficiency:.0%} full")
    return told


def _indivisible(job: Job) -> Iterator[str]:
    shape, split = job.shape, job.dims.tp
    common, rows = math.lcm(MULTIPLE, split), int(job.tokens)
    head, remainder = divmod(shape.attention_width, shape.heads)
    if remainder:
        yield f"hidden size {shape.hidden} is not divisible by {shape.heads} heads"
    elif head % MULTIPLE:
        better = near_width(head)
        count, rest = divmod(shape.attention_width, better)
        hint = "" if rest else f"; {count} heads of {better} would be"
        yield f"the head size {head} is not a multiple of {MULTIPLE}{hint}"
    for name, count in (("heads", shape.heads), ("key and value heads", shape.kv_heads)):
        if count % split:
            yield f"{count} {name} are not divisible by tp {split}"
    if shape.hidden % MULTIPLE:
        yield f"hidden size {shape.hidden} is not a multiple of {MULTIPLE}: {near_width(shape.hidden)} is the nearest"
    if shape.vocab % common:
        yield f"vocabulary of {shape.vocab} is not a multiple of {common}: pad it to {padded(shape.vocab, common)}"
    multiple = MULTIPLE * job.mlp_split
    if shape.ffn % multiple:
        usual = f", and 8/3 of the hidden size is {swiglu_width(shape.hidden, multiple)}" if shape.gated else ""
        nearest = near_width(shape.ffn, multiple)
        yield f"MLP width {shape.ffn} is not a multiple of {multiple}: {nearest} is the nearest{usual}"
    if rows % MULTIPLE:
        yield f"{rows} tokens of a micro-batch (b x s) are not a multiple of {MULTIPLE}: {padded(rows)} would be"


def table(job: Job) -> list[list[str]]:
    """Return the header and a row for each product; on a CPU without the columns of tiles and waves."""
    header = ["forward product", "rows x inputs x outputs", "tiles", "waves", "tile eff.", "wave eff."]
    rows = [
        [product.name, f"{product.rows} x {product.inputs} x {product.outputs}", f"{product.tiles}", f"{product.waves}",
         f"{product.tile_efficiency:.0%}", f"{product.wave_efficiency:.0%}"]
        for product in products(job)
    ]  # fmt: skip
    return [row[:2] if _has_no_tiles(job) else row for row in (header, *rows)]
