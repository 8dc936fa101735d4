"""The loss of logits whose columns are divided over the ranks of a tensor-parallel group.

Each rank has the rows of the output head for its part of the vocabulary, and so those columns of the logits. Of each
token the ranks exchange three numbers: the greatest logit, the sum of the exponentials and the target's logit
(Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053, section 3). A loss that needs other numbers gathers the columns
of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from samecurve.losses.cross_entropy import IGNORE_INDEX, sum_and_gradient, token_loss_sum


class HeadWeights(NamedTuple):
    """The weights of an output head that is no module of its own, such as a tied embedding."""

    weight: Tensor
    bias: Tensor | None = None


OutputHead = nn.Linear | HeadWeights


class VocabularyColumns(NamedTuple):
    """This rank's columns of the logits; all ranks have equally many.

    Attributes:
        start: the first column.
        count: the number of ranks.
        group: the ranks, in the order of their columns.
    """

    start: int
    count: int
    group: dist.ProcessGroup

    def whole(self, logits: Tensor) -> Tensor:
        """Gather all columns: (n, columns) -> (n, vocabulary), without an autograd graph. Collective."""
        parts = [torch.empty_like(logits) for _ in range(self.count)]
        dist.all_gather(parts, logits.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def sum_and_gradient(
        self, measure: Callable[..., Tensor], logits: Tensor, **targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the scalar measure(logits of all columns, **targets) and its gradient for this rank's columns.

        Collective.

        Args:
            measure: see TokenSums. token_loss_sum is computed without gathering the columns.
            logits: (n, columns), without an autograd graph.
            targets: (n, ...) each.
        """
        if measure is token_loss_sum:
            return self._cross_entropy(logits, **targets)
        loss, gradient = sum_and_gradient(measure, self.whole(logits), **targets)
        return loss, gradient.narrow(-1, self.start, logits.shape[-1])

    def _cross_entropy(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        own, trained = logits.float(), labels != IGNORE_INDEX
        greatest = own.amax(dim=-1)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.group)
        shifted = own - greatest[:, None]  # so that no exponential overflows
        index = labels - self.start
        is_own = (index >= 0) & (index < own.shape[-1])
        # another rank's target reads some column of this one, and the value is not used
        index = index.clamp(0, own.shape[-1] - 1)[:, None]
        target = torch.where(is_own, shifted.gather(-1, index).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), target])
        dist.all_reduce(sums, group=self.group)
        losses = torch.where(trained, sums[0].log() - sums[1], 0.0)
        gradient = exponentials.div_(sums[0][:, None])
        gradient.scatter_add_(-1, index, -is_own.to(gradient.dtype)[:, None])
        gradient = torch.where(trained[:, None], gradient, 0.0)
        if weights is not None:
            losses, gradient = losses * weights, gradient.mul_(weights[:, None])
        return losses.sum(), gradient.to(logits.dtype)


def own_part(weight: DTensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, VocabularyColumns]:
    """Return this rank's rows of an output head's weight and bias, with its columns of the logits.

    The gradients of both are placed like the parameters.
    """
    mesh = weight.device_mesh
    even = weight.shape[0] % mesh.size() == 0  # the strategy refuses other vocabularies
    assert weight.placements == (Shard(0),) and even, f"unknown placements {weight.placements} of the output head"
    columns = VocabularyColumns(weight.shape[0] // mesh.size() * mesh.get_local_rank(), mesh.size(), mesh.get_group())
    return weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias, columns
