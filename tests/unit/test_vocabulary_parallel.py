"""The cross-entropy of logits whose columns two ranks have, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

from samecurve.losses.cross_entropy import IGNORE_INDEX, token_loss_sum
from samecurve.losses.vocabulary_parallel import VocabularyColumns


def squares(logits, labels):
    """A loss that needs whole rows."""
    return (logits.softmax(dim=-1).square().sum(dim=-1) * (labels != IGNORE_INDEX)).sum()


def compare(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 12, generator=made) * 30
    labels = torch.randint(0, 12, (9,), generator=made)
    labels[[2, 7]] = IGNORE_INDEX
    labels[3], labels[4] = 5, 6  # at both sides of the border
    group = dist.group.WORLD
    assert group is not None
    columns, own = VocabularyColumns(6 * rank, 2, group), slice(6 * rank, 6 * rank + 6)
    assert torch.equal(columns.whole(logits[:, own]), logits)
    for measure in (token_loss_sum, squares):
        whole = logits.clone().requires_grad_()
        expected = measure(whole, labels)
        expected.backward()
        loss, gradient = columns.sum_and_gradient(measure, logits[:, own].clone(), labels=labels)
        torch.testing.assert_close(loss, expected.detach())
        assert whole.grad is not None
        torch.testing.assert_close(gradient, whole.grad[:, own])
    whole, weights = logits.clone().requires_grad_(), torch.rand(9, generator=made)
    expected = (cross_entropy(whole, labels, reduction="none") * weights).sum()
    expected.backward()
    targets = {"labels": labels, "weights": weights}
    loss, gradient = columns.sum_and_gradient(token_loss_sum, logits[:, own].clone(), **targets)
    torch.testing.assert_close(loss, expected.detach())
    assert whole.grad is not None
    torch.testing.assert_close(gradient, whole.grad[:, own])
    nothing, gradient = columns.sum_and_gradient(token_loss_sum, logits[:0, own], labels=labels[:0])
    assert nothing == 0 and gradient.shape == (0, 6)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_sum_and_gradient_are_those_of_whole_logits(tmp_path):
    spawn(compare, (str(tmp_path),), nprocs=2)
