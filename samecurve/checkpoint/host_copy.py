"""Host memory for the copy that a background save writes, with as many bytes as the copied tensors have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ALIGNMENT = 16  # Tensor.view(dtype) needs an offset that is a multiple of the dtype's size
_SMALLEST_BYTES = 2**16  # of a block: totals are rounded up to it, or their low bits would become tiny blocks


class HostCopy:
    """Buffers for 1-D tensors of known sizes and dtypes, reused between saves: allocating pinned memory is slow.

    PyTorch rounds every pinned allocation up to a power of two and never gives it back. One buffer per tensor, or one
    for all of them, could therefore take twice the bytes. The blocks here are powers of two that add up to the total,
    and a tensor may continue in the next block.

    Args:
        tensors: those to copy; only their sizes, dtypes and devices are read.
    """

    def __init__(self, tensors: Iterator[Tensor]):
        self._sizes, on_gpu, total = [], False, 0
        for tensor in tensors:
            self._sizes.append((total, tensor.numel(), tensor.dtype))
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            on_gpu |= tensor.device.type == "cuda"
        self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in block_sizes(total)]

    def keep(self, index: int, value: Tensor) -> None:
        """Copy `value`, the index-th tensor. From a GPU the copy is asynchronous: synchronize before `read`."""
        parts = self._parts(index)
        for part, piece in zip(parts, value.split([len(part) for part in parts]), strict=True):
            part.copy_(piece, non_blocking=True)

    def read(self, index: int) -> Tensor:
        """Return the copy of the index-th tensor: 1-D, a view of the buffer where one block has all of it."""
        parts = self._parts(index)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, index: int) -> list[Tensor]:
        """Return views of the blocks that hold the index-th tensor, in order; at least one."""
        begin, numel, dtype = self._sizes[index]
        end, first, parts = begin + numel * dtype.itemsize, 0, []
        for block in self.blocks:
            low, high = max(begin - first, 0), min(end - first, len(block))
            if low < high:
                parts.append(block[low:high].view(dtype))
            first += len(block)
        return parts or [torch.empty(0, dtype=dtype)]


def block_sizes(total: int) -> list[int]:
    """Split a number of bytes, rounded up to 64 KiB, into different powers of two, the largest first."""
    rounded = -(-total // _SMALLEST_BYTES) * _SMALLEST_BYTES
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]
