"""Reads a table of runs (runs.csv) into jobs. Measured columns are never read."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.planner.hardware import gpu
from samecurve.planner.job import Job, StateBytes
from samecurve.planner.layout import Layout
from samecurve.planner.shape import ModelShape

NEEDED = (
    "id stack layers hidden heads kv_heads ffn mlp vocab tied experts top_k gpu gpu_memory_gib gpus_per_node "
    "inter_node_gbit gpus dp tp pp cp ep virtual_stages schedule zero shard sequence_parallel micro_batch grad_accum "
    "global_batch seq precision weight_bytes grad_bytes accum_bytes master_bytes optim_bytes flash compile async_tp "
    "fp8_recipe chunked_loss packed_experts activation_checkpointing memory_kind"
).split()
USUAL_HEAD, USUAL_VOCABULARY = 128, 50_257  # width of an attention head; GPT-2's vocabulary
SURPLUS = "cells without a column"  # contains spaces, unlike the names of columns
SHOWN = 60  # characters of surplus cells
UNUSED = (
    "source url model params_b step_s tokens_per_s_per_gpu mfu_pct_published memory_gib status oom_evidence time_ok "
    "memory_ok quality note"
).split()


def read(path: Path) -> list[dict[str, str]]:
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
        problems = [f"{path}:{line}: {text}" for line, text in _row_problems(rows)]
        problems += [] if rows else [f"{path}: no row below the names of the columns; give a row for each run"]
    if problems:
        raise ConfigurationError("\n".join(problems))
    return [row for _, row in rows]


def _row_problems(rows: Sequence[tuple[int, dict[str, str]]]) -> Iterator[tuple[int, str]]:
    """Generate (line, problem) of rows whose cells may be shifted."""
    for line, row in rows:
        if SURPLUS in row:
            beyond = ", ".join(map(repr, row[SURPLUS]))[:SHOWN]
            yield line, f"cells beyond the last column: {beyond}; quote a cell with a comma, or remove them"


class _Cells:
    """Reads the cells of a row. Raises ValueError, which names the column."""

    def __init__(self, row: dict[str, str]):
        self.row = row

    def text(self, name: str) -> str:
        return self.row[name].strip()

    def word(self, name: str) -> str:
        """Return a word of a list, in small letters: a table may say Megatron."""
        return self.text(name).lower()

    def number(self, name: str, default: float = 0) -> float:
        text = self.text(name)
        try:
            found = float(text) if text else default
        except ValueError:
            raise ValueError(f"column {name}: {text!r} is not a number") from None
        if not math.isfinite(found) or found < 0:
            told = "a finite number" if found > 0 or math.isnan(found) else "no negative number"
            raise ValueError(f"column {name}: found {text!r}, expected {told}; leave the cell empty if it is unknown")
        return found

    def count(self, name: str, default: int = 1) -> int:
        return int(self.number(name, default)) or default

    def size(self, name: str, default: float = 0) -> int:
        found = int(self.number(name, default))
        if found < 1:
            raise ValueError(f"column {name}: found {self.text(name)!r}, expected a positive number")
        return found

    def flag(self, name: str) -> bool:
        return bool(self.number(name))


def job(row: dict[str, str]) -> Job:
    """Turn a row into a job.

    What a row leaves out follows from its other cells where they imply it, and is what is usual where they do not.

    Raises:
        ValueError: a cell is no number, or negative, or one without which nothing is known is missing; it names the
            column.
    """
    cells = _Cells(row)
    shape, layout = _shape(cells), _layout(cells)
    rows = max(1, cells.count("global_batch") // layout.dp)  # of a step on one data-parallel rank
    micro_batch = cells.size("micro_batch", max(1, rows // cells.count("grad_accum")))
    sizes = [cells.number(f"{name}_bytes") for name in ("weight", "grad", "accum", "master", "optim")]
    kind, precision = cells.text("gpu"), cells.word("precision")
    if not kind:
        raise ValueError("column gpu: missing; give a kind such as H100-80GB")
    return Job(
        shape, layout, gpu(kind), micro_batch, cells.size("seq"),
        cells.count("grad_accum", max(1, rows // micro_batch)),
        StateBytes(*sizes) if any(sizes) else StateBytes(), kind, cells.number("gpu_memory_gib"),
        cells.count("gpus_per_node", 8), cells.number("inter_node_gbit"), "fp8" if "fp8" in precision else precision,
        cells.word("fp8_recipe"), cells.flag("flash"), cells.flag("compile"), cells.flag("async_tp"),
        cells.flag("chunked_loss"), cells.word("activation_checkpointing") or "none", cells.word("stack"),
        cells.word("memory_kind"), packed_experts=cells.flag("packed_experts"),
    )  # fmt: skip


def _shape(cells: _Cells) -> ModelShape:
    gated, hidden = cells.word("mlp") != "gelu", cells.size("hidden")
    heads = cells.size("heads", max(1, hidden // USUAL_HEAD))
    ffn = cells.size("ffn", round(8 * hidden / 3) if gated else 4 * hidden)
    return ModelShape(
        cells.size("layers"), hidden, heads, cells.count("kv_heads", heads), ffn,
        cells.size("vocab", USUAL_VOCABULARY), gated, cells.flag("tied"), int(cells.number("experts")),
        int(cells.number("top_k")), 0 if gated else cells.size("seq"),  # learned positions of a GPT
    )  # fmt: skip


def _layout(cells: _Cells) -> Layout:
    sizes = {name: cells.count(name) for name in ("tp", "pp", "cp", "ep", "virtual_stages")}
    replicas = cells.count("dp", max(1, cells.count("gpus") // (sizes["tp"] * sizes["pp"] * sizes["cp"])))
    zero = int(cells.number("zero"))
    return Layout(
        replicas, **sizes, schedule=cells.text("schedule"), zero=zero,
        shard=cells.count("shard", replicas if zero else 1), sequence_parallel=cells.flag("sequence_parallel"),
        exchange="ring", partition="",
    )  # fmt: skip
