"""Log-probabilities of labels in chunks of tokens, for losses of whole answers such as DPO's.

Such a loss is no sum over tokens: a token's gradient depends on the log-probabilities of both answers. So the backward
pass computes each chunk's logits once more, and the logits of a micro-batch never exist all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samecurve.losses.chunked_cross_entropy import HeadGradients, as_dtype_of, logits_of, prepared, slices
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.losses.vocabulary_parallel import OutputHead, VocabularyColumns


@dataclass(frozen=True)
class LabelLogProbabilities:
    """What the output head is to compute in place of logits.

    Attributes:
        labels: (sequences, length), already shifted, on the model's device.
        positions: indices of the trained tokens among all tokens; None: all are trained.
    """

    labels: Tensor
    positions: Tensor | None = None

    def computed(self, hidden: Tensor, head: OutputHead, kind: str = "chunked", compiles: bool = False) -> Tensor:
        """See chunked_log_probabilities; in one way only."""
        return chunked_log_probabilities(hidden, head, self)  # pyright: ignore  # torch.compiler.disable has no types


@torch.compiler.disable
def chunked_log_probabilities(hidden: Tensor, head: OutputHead, wanted: LabelLogProbabilities) -> Tensor:
    """Compute the log-probability of each label: (sequences, length), fp32, in nats, 0 where nothing is trained.

    Collective, forward and backward, if the vocabulary is divided.

    Args:
        hidden: (sequences, length, hidden_size).
        wanted: the labels.
    """
    labels, states = wanted.labels.flatten(), hidden.flatten(0, 1)
    values = torch.zeros(labels.shape, device=hidden.device)
    places = wanted.positions if wanted.positions is not None else torch.arange(len(labels), device=hidden.device)
    with prepared(states.index_select(0, places), head) as (chosen, weight, bias, columns):
        of_chosen = _LogProbabilities.apply(chosen, weight, bias, labels.index_select(0, places), columns)
    return values.index_put((places,), of_chosen).view(wanted.labels.shape)


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, columns: VocabularyColumns | None
    ) -> Tensor:
        """Compute (n,) of hidden (n, hidden_size); with `columns`, weight and bias are this rank's part."""
        computed, shift = as_dtype_of(hidden, weight, bias)
        values, greatest, totals = (torch.zeros(len(labels), device=hidden.device) for _ in range(3))
        for at in slices(len(labels), computed):
            logits = logits_of(hidden[at], computed, shift).float()
            index, is_own = _own(labels[at], logits, columns)
            target = torch.where(is_own, logits.gather(-1, index[:, None]).squeeze(-1), 0.0)
            # over the columns of all ranks
            highest = logits.amax(dim=-1)
            if columns is not None:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=columns.group)
            total = (logits - highest[:, None]).exp_().sum(dim=-1)
            if columns is not None:
                dist.all_reduce(total, group=columns.group)
                dist.all_reduce(target, group=columns.group)
            greatest[at], totals[at] = highest, total
            # the greatest logit first: the difference of two large numbers would be rounded as they are
            of_chunk = target - highest - total.log()
            values[at] = torch.where(labels[at] == IGNORE_INDEX, 0.0, of_chunk)
        ctx.save_for_backward(hidden, weight, bias, labels, greatest, totals)
        ctx.columns = columns
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients; `factor` is (n,), the loss's gradient of each log-probability."""
        hidden, weight, bias, labels, greatest, totals = ctx.saved_tensors
        computed, shift = as_dtype_of(hidden, weight, bias)
        gradients = HeadGradients.of(hidden, weight, bias)
        factor = factor.masked_fill(labels == IGNORE_INDEX, 0.0)
        for at in slices(len(labels), computed):
            logits = logits_of(hidden[at], computed, shift).float()
            index, is_own = _own(labels[at], logits, ctx.columns)
            of_logits = logits.sub_(greatest[at, None]).exp_().mul_(-(factor[at] / totals[at])[:, None])
            of_logits.scatter_add_(-1, index[:, None], torch.where(is_own, factor[at], 0.0)[:, None])
            gradients.add(at, of_logits.to(hidden.dtype), hidden[at], computed)
        if ctx.columns is not None:  # each rank's columns give one term
            dist.all_reduce(gradients.of_hidden, group=ctx.columns.group)
        pairs = zip(gradients, (hidden, weight, bias), strict=True)
        return *(None if gradient is None else gradient.to(like.dtype) for gradient, like in pairs), None, None


def _own(labels: Tensor, logits: Tensor, columns: VocabularyColumns | None) -> tuple[Tensor, Tensor]:
    """Return a column of this rank for each label, (n,), and whether it is the label's; else its value is not used."""
    index = labels - (columns.start if columns else 0)
    is_own = (index >= 0) & (index < logits.shape[-1])
    return index.clamp(0, logits.shape[-1] - 1), is_own
