"""Parallel sizes of a job, and which ranks form a group."""

from __future__ import annotations

from dataclasses import dataclass

ORDER = ("tp", "cp", "dp", "pp")  # from the fastest-varying rank outwards, as in Megatron and torch's device mesh


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; dp x tp x pp x cp GPUs. Experts split dp.

    Attributes:
        virtual_stages: model chunks of a rank in an interleaved pipeline.
        schedule: of the pipeline: PyTorch's name of one of its own, else gpipe, 1f1b, interleaved, zb-1p, zb-2p, or "".
        partition: how DeepSpeed's pipeline divides the layers (`pipeline.partition`), or "".
        exchange: how ranks see the keys of a row's other parts: ulysses, allgather or ring.
        zero: what is sharded over `shard` ranks: 1 optimizer, 2 gradients too, 3 weights too.
        secondary: ranks over which ZeRO-3 shards a second copy of the weights (hpZ); 1 without one.
        sequence_parallel: whether the parts that TP does not split are split along the sequence.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    schedule: str = ""
    zero: int = 0
    shard: int = 1
    secondary: int = 1
    sequence_parallel: bool = False
    partition: str = ""
    exchange: str = "ring"

    @property
    def row_exchange(self) -> str:
        """`exchange` where rows are divided over ranks, else ""."""
        return self.exchange if self.cp > 1 else ""

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def stride(self, axis: str, order: tuple[str, ...] = ORDER) -> int:
        """Distance of neighbouring ranks of one group of `axis`."""
        stride = 1
        for name in order[: order.index(axis)]:
            stride *= getattr(self, name)
        return stride

    def groups(self, axis: str, order: tuple[str, ...] = ORDER) -> list[list[int]]:
        """List the ranks of every group of `axis`, each group and the list in ascending order."""
        stride, size = self.stride(axis, order), getattr(self, axis)
        first = [rank for rank in range(self.gpus) if rank // stride % size == 0]
        return [[rank + step * stride for step in range(size)] for rank in first]


def data_parallel_size(gpus: int, **sizes: int) -> int:
    """Divide the GPUs by the other parallel sizes. Raises ValueError if they do not divide."""
    product = 1
    for size in sizes.values():
        product *= size
    if gpus % product:
        named = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{gpus} GPUs are not a multiple of {named} = {product}")
    return gpus // product
