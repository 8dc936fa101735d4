"""A loss in which all rows of a step meet: its value and gradient do not depend on how the step is cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from samecurve.accelerator.accelerator import Accelerator
from samecurve.config.schema import Batch
from samecurve.data.micro_batch import MicroBatch
from samecurve.engines.forward import Forward, task_contexts
from samecurve.engines.torch_engine import TorchEngine
from samecurve.interfaces.task import Task
from samecurve.losses.cross_entropy import IGNORE_INDEX, count_trained
from samecurve.models.dropout import DropoutKeys, KeyedDropout
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Strategy


class Projection(nn.Module):
    """(rows, 3) to (rows, 2), of which some are dropped in training."""

    def __init__(self, dropout: float):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6]]))
        self.dropout, self.seen = nn.Dropout(dropout), []

    def forward(self, rows: Tensor, input_ids: Tensor) -> SimpleNamespace:
        found = self.dropout(rows @ self.weight)
        self.seen.append(found.detach())
        return SimpleNamespace(embeddings=found)


def everyone_meets(embeddings: Tensor) -> Tensor:
    """(rows,): each row's loss knows all others."""
    return (embeddings @ embeddings.T).logsumexp(dim=1)


class Meeting(Task):
    def outputs(self, found) -> Tensor:
        return found.embeddings

    def features(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return embeddings

    def context(self, features: Tensor) -> dict[str, Tensor]:
        features = features.detach().requires_grad_()
        losses = everyone_meets(features)
        losses.sum().backward()
        return {"row_loss": losses.detach(), "gradient": features.grad}

    def loss(self, embeddings: Tensor, labels: Tensor, row_loss: Tensor, gradient: Tensor) -> Tensor:
        linear = (embeddings * gradient).sum()
        return row_loss.sum() + linear - linear.detach()

    def count(self, labels: Tensor) -> int:
        return count_trained(labels)


def engine(accumulation: int, dropout: float = 0.0) -> TorchEngine:
    made = TorchEngine.__new__(TorchEngine)
    made.accelerator = Accelerator(dims=ParallelDims(), cpu=True, gradient_accumulation_steps=accumulation)
    made.device = made.accelerator.device
    made.mesh = made.accelerator.mesh
    made.plan, made.sharded, made.whole = SimpleNamespace(strategy=Strategy()), False, []
    made.recipe = SimpleNamespace(optimizer=SimpleNamespace(max_grad_norm=1e9))
    made.model, made.task, made.loss_scale = Projection(dropout), Meeting(), None
    rows = Batch(global_batch_size=8, micro_batch_size=-(-8 // accumulation), sequence_length=1).micro_batches(1)
    keys = DropoutKeys(5, made.device, SimpleNamespace())
    made.model.dropout = KeyedDropout(dropout, keys.add("dropout"))
    made.forward = Forward(made.accelerator, made.mesh, made.model, made.task, rows=rows, dropout=keys)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=1.0)
    made.summed, made.first_step = [], SimpleNamespace(is_over=True)
    return made


ROWS = torch.arange(24.0).reshape(8, 3).sin()


def micro_batches(count: int) -> list[MicroBatch]:
    inputs = {"rows": ROWS, "input_ids": ROWS.long()}
    whole = MicroBatch(inputs, {"labels": torch.zeros(8, dtype=torch.long)}, places=torch.arange(8))
    return whole.split(-(-8 // count))  # 3: 3 + 3 + 2 rows


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_loss_and_its_gradient_are_those_of_all_rows_at_once(count):
    one = engine(count)
    reference = Projection(0.0)
    loss = everyone_meets(ROWS @ reference.weight).mean()
    loss.backward()
    result = one.step(micro_batches(count), learning_rate=1.0)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(reference.weight.grad.norm().item(), rel=1e-6)
    torch.testing.assert_close(one.model.weight.data, reference.weight.data - reference.weight.grad)


def test_both_passes_drop_the_same():
    one = engine(2, dropout=0.5)
    before = torch.get_rng_state()
    one.step(micro_batches(2), learning_rate=0.0)
    first, second = torch.cat(one.model.seen[:2]), torch.cat(one.model.seen[2:])
    assert len(one.model.seen) == 4 and (first == 0).any()
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_finds_the_features_of_all_rows_without_dropout():
    one = engine(4, dropout=0.5)
    batches = micro_batches(4)
    batches[-1].labels[-1] = IGNORE_INDEX
    result = one.evaluate(batches)
    assert result.tokens == 7 and result.loss != result.loss
    torch.testing.assert_close(result.features, ROWS @ one.model.weight.data)
    assert one.model.training and not result.features.requires_grad


def test_each_micro_batch_gets_the_context_of_its_own_rows():
    rows = [[2, 2, 1], [2, 2, 0]]
    marked = torch.tensor([1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 0, 0])[:, None]  # 0: padding, which no row may meet

    class Marking(Task):
        def context(self, features: Tensor) -> dict[str, Tensor]:
            assert features.flatten().tolist() == list(range(1, 10))
            return {"place": features[:, 0], "more": features.repeat(1, 2)}

    cut = [task_contexts(Marking(), lambda: marked, rows, rank) for rank in range(2)]
    assert [[part["place"].tolist() for part in parts] for parts in cut] == [
        [[1, 2], [3, 4], [5]],
        [[6, 7], [8, 9], [0]],
    ]
    padded = task_contexts(Marking(), lambda: marked, rows, rank=1, padded=True)
    assert [part["more"].tolist() for part in padded] == [[[6, 6], [7, 7]], [[8, 8], [9, 9]], [[0, 0], [0, 0]]]
