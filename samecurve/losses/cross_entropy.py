"""Token-normalised losses. The only place that knows the ignore index.

The loss of an optimizer step is a sum over its trained tokens, on all ranks and micro-batches, divided once by their
global count. So the functions here return sums and counts, never means: a mean of means is wrong when rows hold
different numbers of trained tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

LOSS = "samecurve: loss"
"""The range that the chunked head puts around a loss and its gradient: compiled, no operator tells what they are. On a
GPU autograd takes gradients in a thread of its own, outside of it, where only the kernels' names tell."""

IGNORE_INDEX = -100


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the trained tokens, in nats.

    logits: (..., vocabulary), any float type. labels: (...), already shifted: labels[b, t] is the target at position
    t, IGNORE_INDEX where nothing is trained. Returns an fp32 scalar; 0 with a graph when no token is trained, so that
    a rank without tokens still takes part in the backward pass.
    """
    # fp32: a sum of thousands of bf16 terms keeps two or three digits.
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def count_trained(labels: Tensor) -> int:
    """Number of labels that are trained on."""
    return int((labels != IGNORE_INDEX).sum())
