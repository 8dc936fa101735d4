"""Losses of the routers of a mixture of experts, as sums that add up over sequences and micro-batches.

The load-balancing loss is transformers' `load_balancing_loss_func` (Switch Transformer, arXiv:2101.03961, equations 4
to 6): E * sum_i f_i P_i for E experts, with f_i the experts' counts and P_i their mean probabilities, both per token
and over all routers of the model together. The product of two means depends on the tokens that share it:

- per sequence (DeepSeek-V3, arXiv:2412.19437, equation 17; Megatron-LM's seq_aux_loss), which no split can change;
- over the global batch. The counts have no gradient, so with the counts of the whole step given, a micro-batch's share
  is linear in its own probabilities, and the shares and their gradients add up to those of the global batch.

The z-loss is the mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, equation 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Sums over the counted tokens of some sequences.

    Attributes:
        counts: (routers, sequences, experts) fp32, how many tokens chose an expert; without gradient.
        probabilities: (sequences, experts) fp32, of all routers.
        places: (sequences,) fp32, tokens times routers.
        squares: fp32 scalar, logsumexp(logits)^2 of all routers.
    """

    counts: Tensor
    probabilities: Tensor
    places: Tensor
    squares: Tensor


def routing(logits: Sequence[Tensor], counted: Tensor, top_k: int) -> Routing:
    """Sum up what the routers did.

    Args:
        logits: (sequences * sequence_length, experts) of each router.
        counted: (sequences, sequence_length) bool, the tokens that count.
        top_k: experts per token.
    """
    weights, num_experts = counted.float(), logits[0].shape[-1]
    counts, probabilities, squares = [], [], []
    for layer in logits:
        values = layer.float().view(*counted.shape, num_experts)
        chances = values.softmax(dim=-1)
        chosen = chances.detach().topk(top_k, dim=-1).indices.flatten(1)
        zeros = weights.new_zeros(len(counted), num_experts)
        counts.append(zeros.scatter_add_(1, chosen, weights.repeat_interleave(top_k, dim=1)))
        probabilities.append((chances * weights[..., None]).sum(dim=1))
        squares.append((values.logsumexp(dim=-1).square() * weights).sum())
    places = weights.sum(dim=1) * len(logits)
    return Routing(torch.stack(counts), torch.stack(probabilities).sum(dim=0), places, torch.stack(squares).sum())


def sum_over_sequences(routing: Routing) -> Tensor:
    """Sum the sequences' load-balancing losses, each over the sequence's own counted tokens: fp32 scalar."""
    places = routing.places.clamp(min=1)[:, None]  # a sequence without counted tokens has sums of 0
    return routing.counts.shape[-1] * (routing.counts.sum(dim=0) / places * routing.probabilities / places).sum()


def share_of_batch(routing: Routing, counts: Tensor, places: float) -> Tensor:
    """Compute these sequences' share of a global batch's load-balancing loss: fp32 scalar.

    Args:
        found: the sequences.
        counts: (experts,) fp64, tokens of the global batch that chose an expert, over all routers.
        places: tokens of the global batch times routers.
    """
    frequencies = (counts / places).to(routing.probabilities.dtype)
    return len(counts) * (frequencies * routing.probabilities.sum(dim=0) / places).sum()
