"""Log-probabilities of labels computed in chunks, and their gradients, against torch's from whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_chunked_head import small_chunks  # noqa: F401  a fixture, for every test here
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samecurve.losses.chunked_cross_entropy import trained_positions
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.losses.token_log_probabilities import (
    LabelLogProbabilities,
    _LogProbabilities,
    chunked_log_probabilities,
)
from samecurve.losses.vocabulary_parallel import VocabularyColumns

ROWS, LENGTH, HIDDEN, VOCABULARY = 4, 9, 8, 12


def sample(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    nn.init.normal_(head.weight, std=3.0)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    labels[0, 3:], labels[2] = IGNORE_INDEX, IGNORE_INDEX
    return head, hidden, labels


def from_whole_logits(head, hidden, labels):
    logits = F.linear(hidden, head.weight.to(hidden.dtype), None if head.bias is None else head.bias.to(hidden.dtype))
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view(labels.shape)


def loss_of(found):
    """No sum over tokens: each depends on all others of its row."""
    return F.logsigmoid(found.sum(dim=-1)).sum() + found.square().mean()


def gradients(loss, head, hidden):
    return torch.autograd.grad(loss, [each for each in (hidden, head.weight, head.bias) if each is not None])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_values_and_gradients(dtype, limit, bias):
    head, hidden, labels = sample(dtype, bias)
    expected = from_whole_logits(head, hidden, labels)
    found = chunked_log_probabilities(hidden, head, LabelLogProbabilities(labels, trained_positions(labels)))
    torch.testing.assert_close(found, expected)
    assert found.dtype == torch.float32 and not found[2].any()
    pairs = zip(*(gradients(loss_of(each), head, hidden) for each in (found, expected)), strict=True)
    for own, whole in pairs:
        assert own.dtype == whole.dtype and (own - whole).norm() <= limit * whole.norm()


@pytest.mark.parametrize("positions", [None, torch.zeros(0, dtype=torch.long)])
def test_all_tokens_and_none(positions):
    head, hidden, labels = sample()
    labels = labels.clamp(min=0)
    found = chunked_log_probabilities(hidden, head, LabelLogProbabilities(labels, positions))
    expected = from_whole_logits(head, hidden, labels) * (positions is None)
    torch.testing.assert_close(found, expected)
    assert len(gradients(loss_of(found), head, hidden)) == 3


def test_no_tensor_holds_all_logits():
    """4 x 9 tokens, of which 7 are computed at once."""
    head, hidden, labels = sample()
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            largest.extend(each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor))
            return found

    with Sizes():
        loss_of(chunked_log_probabilities(hidden, head, LabelLogProbabilities(labels.clamp(min=0)))).backward()
    assert max(largest) == max(7 * VOCABULARY, hidden.numel(), head.weight.numel()) < labels.numel() * VOCABULARY


def test_a_frozen_head_has_no_gradient():
    head, hidden, labels = sample()
    head.requires_grad_(False)
    chunked_log_probabilities(hidden, head, LabelLogProbabilities(labels, trained_positions(labels))).sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


def on_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group, half = dist.group.WORLD, VOCABULARY // 2
    assert group is not None
    head, hidden, labels = sample()
    expected = from_whole_logits(head, hidden, labels)
    own = slice(half * rank, half * rank + half)
    weight, bias = (each.detach()[own].clone().requires_grad_() for each in (head.weight, head.bias))
    states = hidden.detach().flatten(0, 1).requires_grad_()
    found = _LogProbabilities.apply(states, weight, bias, labels.flatten(), VocabularyColumns(half * rank, 2, group))
    found = found.view(labels.shape)
    torch.testing.assert_close(found, expected)
    loss_of(found).backward()
    of_hidden, of_weight, of_bias = gradients(loss_of(expected), head, hidden)
    torch.testing.assert_close(states.grad.view_as(of_hidden), of_hidden)
    torch.testing.assert_close(weight.grad, of_weight[own])
    torch.testing.assert_close(bias.grad, of_bias[own])
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_divided_vocabulary(tmp_path):
    spawn(on_two_ranks, (str(tmp_path),), nprocs=2)
