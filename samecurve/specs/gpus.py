"""Rates of GPUs by name (gpus.csv): for MFU, and for the planner."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class GpuRow:
    """A kind of GPU. Numbers that nobody has published are 0.

    Data sheets that are easily confused: NVIDIA A30 (2021), RTX 6000 Ada Generation (2022) and Turing's white paper
    (RTX 2080 Ti, fp32 sums); AMD Instinct MI200 series (2021), MI210 and MI355X (2025). Each of the two dies of an
    MI250 is a GPU, with half of the data sheet's numbers.

    Attributes:
        pattern: regular expression of the names that people write; the first row that matches counts.
        device: of torch's names for which MFU is computed; it excludes variants with other units or clocks and no data
            sheet here, whose peak is measured (the A100 of 64 GB is Leonardo's, with 124 multiprocessors for 108).
        half, tf32, fp32, fp8: dense peaks of the data sheet in TFLOP/s, without sparsity; bf16 and fp16 are alike, and
            fp32 is without TF32.
        best, best_fp8: TFLOP/s of the fastest product that was measured (github.com/stas00/ml-engineering,
            compute/accelerator/README.md, MAMF).
        hbm: GB/s of memory bandwidth.
        link: what connects the GPUs of a node, a key of planner/hardware.LINKS.
        gib, label: memory as torch reports it, else GB of the data sheet.
        generation: key of the sustained rates in planner/hardware.py; "other" for none.
        sms: streaming multiprocessors, or AMD's compute units.
        source: of `half` and `tf32`.
    """

    pattern: str
    device: str
    half: float
    tf32: float
    fp32: float
    fp8: float
    best: float
    best_fp8: float
    hbm: float
    link: str
    gib: float
    label: float
    generation: str
    sms: int
    source: str


@lru_cache(maxsize=1)
def rows() -> tuple[GpuRow, ...]:
    """Read the table."""
    numbers = {field.name: {"float": float, "int": int}.get(str(field.type), str) for field in fields(GpuRow)}
    with Path(__file__).with_name("gpus.csv").open(newline="", encoding="utf-8") as file:
        return tuple(
            GpuRow(
                **{name: numbers[name](text or (0 if numbers[name] is not str else "")) for name, text in row.items()}
            )
            for row in csv.DictReader(file)
        )
