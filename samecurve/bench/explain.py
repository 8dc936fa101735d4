"""`bench collectives --explain`: the tensors of three ranks before and after each collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from samecurve.bench import barrier, printing
from samecurve.bench.collective_calls import COLLECTIVES, Buffers, Collective, is_unsupported

RANKS = 3


@dataclass(frozen=True)
class Meaning:
    """The effect of a collective.

    Attributes:
        sentence: says so in words.
        reads: the buffer that is sent, an attribute of Buffers.
        root_only: only rank 0 sends.
    """

    sentence: str
    reads: str = "whole"
    root_only: bool = False


MEANINGS = {
    "broadcast": Meaning("rank 0's tensor, on every rank", root_only=True),
    "reduce": Meaning("the sum of all, on rank 0"),
    "all_reduce": Meaning("the sum of all, on every rank"),
    "ring_all_reduce": Meaning("the same, by sending parts to the next rank only, two times around the ring"),
    "gather": Meaning("one part of each rank, side by side on rank 0", reads="part"),
    "all_gather": Meaning("one part of each rank, side by side on every rank", reads="part"),
    "scatter": Meaning("one part of rank 0's tensor to each rank", root_only=True),
    "reduce_scatter": Meaning("the sum of all, one part of it on each rank"),
    "all_to_all": Meaning("part i of each rank, side by side on rank i"),
    "send_recv": Meaning("the tensor of the rank before"),
}


def explain(names: Sequence[str]) -> None:
    """Run each collective on numbers that tell where they come from, and print them; to be called on all ranks.

    Rank 0 has 1 2 3, rank 1 has 10 20 30, rank 2 has 100 200 300, so that 111 is the sum of all first numbers.
    """
    for name in names:
        if name == barrier.NAME:
            lines = ["barrier: no tensor; no rank continues before all have arrived"]
        else:
            lines = _lines(name, COLLECTIVES[name])
        if dist.get_rank() == 0:
            printing.print_line("\n" + "\n".join(lines))


def _lines(name: str, collective: Collective) -> list[str]:
    buffers, meaning = Buffers(4 * RANKS, torch.device("cpu")), MEANINGS[name]
    buffers.whole.copy_(torch.arange(1.0, RANKS + 1) * 10**buffers.rank)
    buffers.part.copy_(buffers.whole[: buffers.part.numel()])
    before = None if meaning.root_only and buffers.rank else getattr(buffers, meaning.reads).clone()
    try:
        after = collective.run(buffers)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if not is_unsupported(error):
            raise
        return [f"{name}: not supported by {dist.get_backend()}"]
    shown = _numbers(before), _numbers(None if collective.expected(buffers.rank, RANKS) is None else after)
    everyone: list = [None] * RANKS
    dist.all_gather_object(everyone, shown)
    rows = [[f"  rank {rank}", *each] for rank, each in enumerate(everyone)]
    return [f"{name}: {meaning.sentence}", *printing.plain_lines([["", "before", "after"], *rows])]


def _numbers(tensor: Tensor | None) -> str:
    return "-" if tensor is None else " ".join(f"{number:g}" for number in tensor.tolist())
