"""When the loss is computed in chunks of tokens, and of how many, for engines, losses and the planner."""

from __future__ import annotations

import math

SMALLEST = 256
"""Minimum tokens per chunk. Each chunk updates the whole gradient of the head's weight, too costly for fewer tokens."""
# Size of a chunk's logits in fp32. Each chunk reads and writes the gradient of the head's weight: on a GPU 2 GB of fp32
# for a vocabulary of 128,256 and 4,096 features, which is small compared with the matrix products only for thousands of
# tokens. The loss creates about four tensors of the logits' size, together a sixteenth of the GPU's memory. On a CPU,
# 1,024 tokens of a vocabulary of 8,192 were faster than 512 and 2,048.
CPU_BYTES, GPU_BYTES, GPU_SHARE = 2**25, 2**30, 64


def are_allowed(implementation: str, precision: str) -> bool:
    """Whether a recipe lets head and loss be computed in chunks, which give fp16 gradients that are often 0.

    Args:
        implementation: `loss.implementation`.
    """
    return implementation != "full" and precision != "fp16"


def on_cpu(columns: float) -> int:
    """Return the tokens per chunk of logits with so many columns."""
    return int(max(SMALLEST, CPU_BYTES // (4 * columns)))


def on_gpu(columns: float, memory_bytes: float | None = None) -> int:
    """Return the tokens per chunk, a power of two, to suit micro-batches and the tiles of matrix products.

    Args:
        columns: of the logits.
        memory_bytes: of the GPU; None for a device that does not tell.
    """
    num_bytes = GPU_BYTES if memory_bytes is None else memory_bytes // GPU_SHARE
    return max(SMALLEST, 2 ** int(math.log2(num_bytes / (4 * columns))))
