"""Imports of the lessons of examples/by_hand/ for probes, and how a probe compares them with an engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "by_hand"))


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Print, on rank 0, the name and the largest difference on any rank, as a share of a tensor's largest number."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape, f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"
        difference = float((a - b).detach().abs().max() / b.detach().abs().max())
        assert difference < float("inf"), f"{name}: {difference}"  # nan, too: also that of zeros
        worst = max(worst, difference)
    largest = torch.tensor(worst)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"COMPARED {name} {largest.item():.1e}", flush=True)
