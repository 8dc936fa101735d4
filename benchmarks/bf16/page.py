"""The counts of scripts/bench_bf16.py as a page."""

from __future__ import annotations

from datetime import date

from benchmarks.bf16.counts import SHAPE, TOKENS, frozen_bytes, kept_bytes, random_states
from benchmarks.machine import commit
from benchmarks.markdown import table
from samecurve.specs.environment import version


def page() -> str:
    before, after = kept_bytes(copies=False), kept_bytes(copies=True)
    rows = [
        ["B1", "activations kept for the backward pass, MB", *(f"{each[0] / 1e6:.1f}" for each in (before, after))],
        ["B1", "bf16 copies of weights kept with them, MB", *(f"{each[1] / 1e6:.1f}" for each in (before, after))],
        ["B10", "frozen weights under LoRA, MB", *(f"{frozen_bytes(each) / 1e6:.2f}" for each in (False, True))],
        ["B12", "copies of the random state", *(str(random_states(each)) for each in (True, False))],
    ]
    shape = ", ".join(f"{key} {value}" for key, value in SHAPE.items())
    return f"""# What bf16 training keeps and copies

Counted on {date.today()} at {commit("benchmarks/bf16.md")} by `python scripts/bench_bf16.py` on a CPU;
torch {version("torch")}, transformers {version("transformers")}.
A Llama ({shape}) passes one row of {TOKENS} tokens forward and backward. The letters are those of
[GPUs](../docs/gpu.md). Before B1: autocast over fp32 weights; after: bf16 copies of them. Before B12:
`torch.utils.checkpoint` as it is, with all layers recomputed.

{table(["", "", "before", "after"], rows)}
"""
