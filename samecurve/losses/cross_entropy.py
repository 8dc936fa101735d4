"""Token-normalized cross-entropy, and the definition of the ignore index.

The loss of an optimizer step is a sum over its trained tokens, on all ranks and micro-batches, divided once by their
global count. The functions here therefore return sums and counts, never means: a mean of means is wrong when rows have
different numbers of trained tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

LOSS = "samecurve: loss"
"""Name of the profiler range that the chunked head puts around a loss and its gradient.

In compiled code no operator name identifies them. On a GPU autograd computes gradients in its own thread, outside the
range, where only the kernels' names identify them.
"""

IGNORE_INDEX = -100


def token_loss_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum the cross-entropy over the trained tokens, in nats, each times its weight.

    Args:
        logits: (..., vocabulary), any float type.
        labels: (...), already shifted: labels[b, t] is the target at position t, IGNORE_INDEX for untrained tokens.
        weights: (...), fp32; None: all are 1.

    Returns:
        fp32 scalar. Without any trained token it is a 0 with an autograd graph, so that a rank without tokens still
        takes part in the backward pass.
    """
    # fp32, because a bf16 sum of thousands of terms keeps only two or three digits
    how, flat = "sum" if weights is None else "none", logits.float().flatten(0, -2)
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction=how)
    return losses if weights is None else (losses * weights.flatten()).sum()


def count_trained(labels: Tensor) -> int:
    """Count the trained labels."""
    return int((labels != IGNORE_INDEX).sum())
