"""One optimizer step of the shared engine on a model small enough for pencil and paper."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from samecurve.accelerator.accelerator import Accelerator
from samecurve.data.micro_batch import MicroBatch
from samecurve.engines.forward import Forward
from samecurve.engines.torch_engine import LossScale, TorchEngine
from samecurve.errors import ConfigurationError
from samecurve.interfaces.task import Task
from samecurve.losses.cross_entropy import IGNORE_INDEX, count_trained
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Strategy


class Dot(nn.Module):
    """logits = the weight itself; the task takes its dot product with each trained row, so the gradient is known."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, **_) -> ModelOutput:
        return ModelOutput(logits=self.weight)


class Task(Task):
    """labels: (rows,), trained where not IGNORE_INDEX; gradients: each row's, (rows, 2)."""

    def loss(self, logits: Tensor, labels: Tensor, gradients: Tensor) -> Tensor:
        return (gradients[labels != IGNORE_INDEX] @ logits).sum()

    def count(self, labels: Tensor, gradients: Tensor) -> int:
        return count_trained(labels)


def rows(*gradients, trained=None) -> MicroBatch:
    labels = torch.zeros(len(gradients), dtype=torch.long)
    if trained is not None:
        labels[~torch.tensor(trained)] = IGNORE_INDEX
    ids = torch.zeros(len(gradients), 1, dtype=torch.long)
    return MicroBatch({"input_ids": ids}, {"labels": labels, "gradients": torch.tensor(gradients, dtype=torch.float32)})


def engine(max_grad_norm: float = 100.0, loss_scale: LossScale | None = None, accumulation: int = 1) -> TorchEngine:
    made = TorchEngine.__new__(TorchEngine)
    made.accelerator = Accelerator(dims=ParallelDims(), cpu=True, gradient_accumulation_steps=accumulation)
    made.device = made.accelerator.device
    made.mesh = made.accelerator.mesh
    made.plan, made.sharded = SimpleNamespace(strategy=Strategy()), False
    made.recipe = SimpleNamespace(optimizer=SimpleNamespace(max_grad_norm=max_grad_norm))
    made.model, made.task, made.loss_scale = Dot(), Task(), loss_scale
    made.forward = Forward(made.accelerator, made.mesh, made.model, made.task)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=1.0)
    made.summed, made.whole, made.first_step = [], [], SimpleNamespace(is_over=True)
    return made


def weight(of: TorchEngine) -> list[float]:
    return of.model.weight.tolist()


def test_accumulation_takes_the_mean_over_tokens_not_over_micro_batches():
    """One token of gradient (8, 0) and three of (0, 4): the mean is (2, 3). A mean of means would give (4, 2)."""
    one = engine(accumulation=2)
    result = one.step([rows((8, 0)), rows((0, 4), (0, 4), (0, 4))], learning_rate=0.5)
    assert weight(one) == [1 - 0.5 * 2, 2 - 0.5 * 3]
    assert result.tokens == 4 and result.applied
    assert result.loss == pytest.approx((8 * 1 + 3 * 4 * 2) / 4)
    assert result.grad_norm == pytest.approx(13**0.5)


class Counting(Dot):
    """Counts its calls in a buffer."""

    def __init__(self, counts: bool):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.counts = counts

    def forward(self, **inputs) -> ModelOutput:
        self.calls += self.counts
        return super().forward(**inputs)


@pytest.mark.parametrize("counts", [False, True])
def test_a_buffer_that_the_first_step_changes_stops_the_run(counts):
    one = engine()
    one.skeleton = SimpleNamespace(config=SimpleNamespace(model_type="counting"))
    one.model = one.forward.model = Counting(counts)
    one._constants = {"calls": torch.zeros(1)}

    def checked(result, _):
        one.first_step.is_over = True
        return result

    one.first_step = SimpleNamespace(is_over=False, checked=checked, add=torch.Tensor.tolist)
    with pytest.raises(ConfigurationError, match=r"buffer of this counting \(calls") if counts else nullcontext():
        one.step([rows((8, 0))], learning_rate=0.5)
    one.step([rows((8, 0))], learning_rate=0.5)  # compared once


class Reporting(Task):
    num_step_statistics = 2

    def step_loss(self, logits: Tensor, **targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(logits, **targets), targets["gradients"].double().sum(dim=0)


def test_what_a_step_reports_is_summed_over_its_micro_batches():
    one = engine(accumulation=2)
    assert one.step([rows((8, 0)), rows((0, 4), (0, 4), (0, 4))], learning_rate=0.5).statistics == ()
    one.task = one.forward.task = Reporting()
    assert one.step([rows((8, 0)), rows((0, 4), (0, 4), (0, 4))], learning_rate=0.5).statistics == (8.0, 12.0)


def test_masked_tokens_count_neither_in_the_sum_nor_in_the_mean():
    one = engine(accumulation=2)
    result = one.step([rows((6, 0), (99, 99), trained=[True, False]), rows((0, 2))], learning_rate=1.0)
    assert weight(one) == [1 - 3, 2 - 1]
    assert result.tokens == 2


def test_clipping_by_hand_and_the_norm_before_it():
    """Gradient (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8)."""
    one = engine(max_grad_norm=1.0)
    result = one.step([rows((3, 4))], learning_rate=1.0)
    assert result.grad_norm == pytest.approx(5.0)
    assert weight(one) == [pytest.approx(1 - 0.6, abs=1e-5), pytest.approx(2 - 0.8, abs=1e-5)]


def test_a_step_without_trained_tokens_is_skipped():
    one = engine()
    result = one.step([rows((3, 4), trained=[False])], learning_rate=1.0)
    assert (result.tokens, result.applied) == (0, False)
    assert weight(one) == [1.0, 2.0]


def test_gradients_do_not_leak_into_the_next_step():
    one = engine()
    one.step([rows((1, 0))], learning_rate=1.0)
    one.step([rows((0, 1))], learning_rate=1.0)
    assert weight(one) == [0.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_not_finite_is_refused_and_leaves_nothing_behind(bad, place):
    one = engine(accumulation=2)
    batches = [rows((1, 0)), rows((1, 0))]
    batches[place] = rows((bad, 1))
    result = one.step(batches, learning_rate=1.0)
    assert not result.applied and result.refused.startswith("the loss is")
    assert weight(one) == [1.0, 2.0]
    assert one.step([rows((1, 0)), rows((1, 0))], learning_rate=1.0).applied
    assert weight(one) == [0.0, 2.0]


def test_a_gradient_that_is_not_finite_is_refused():
    one = engine()
    one.model.weight.register_hook(lambda gradient: gradient * float("nan"))
    result = one.step([rows((1, 0))], learning_rate=1.0)
    assert not result.applied and result.refused.startswith("the gradient norm is nan")
    assert weight(one) == [1.0, 2.0]


def test_fp16_overflow_skips_the_step_and_halves_the_scale():
    one = engine(loss_scale=LossScale(value=8.0))
    hook = one.model.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = one.step([rows((1, 0))], learning_rate=1.0)
    assert not result.applied and not result.refused
    assert weight(one) == [1.0, 2.0] and one.loss_scale.value == 4.0
    hook.remove()
    result = one.step([rows((1, 0))], learning_rate=1.0)
    assert result.applied and weight(one) == [0.0, 2.0]
    assert result.grad_norm == pytest.approx(1.0)  # of the loss, not of the scaled loss


def test_fp16_whose_scale_cannot_fall_further_is_refused():
    one = engine(loss_scale=LossScale(value=1.0))
    one.model.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = one.step([rows((1, 0))], learning_rate=1.0)
    assert not result.applied and result.refused.startswith("the gradient norm is")
    assert weight(one) == [1.0, 2.0]


def test_loss_scale_grows_after_enough_good_steps():
    scale = LossScale(value=4.0, growth_interval=2)
    for applied, expected in [(True, 4.0), (True, 8.0), (False, 4.0), (True, 4.0), (False, 2.0)]:
        scale.update(applied)
        assert scale.value == expected
