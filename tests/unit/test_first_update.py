"""A session's first update, compared with the optimizer's arithmetic and with the copies that the model reads."""

from __future__ import annotations

import pytest
import torch
from test_optimizers import KAHAN, RATES, REFERENCES, ours, settings, weights

from samecurve.accelerator.sharded_state import DTensorShards
from samecurve.engines.first_step import FirstUpdate
from samecurve.optim.factory import state_names
from samecurve.optim.schedule import set_learning_rate
from samecurve.specs.optimizers import OPTIMIZERS

EXACT = [("adamw", {}), ("sgd", {}), ("lion", {}), ("adamw_bf16", {}), ("adamw_bf16", KAHAN)]


class Training:
    """An optimizer with its state; each step is observed by a FirstUpdate of its own."""

    def __init__(self, name: str, make, **more):
        self.name, self.parameters = name, weights()
        self.parameters += [torch.nn.Parameter(torch.zeros(3))]  # in use, but without a gradient
        self.optimizer = make(self.parameters)
        self.named = {f"weight {index}": weight for index, weight in enumerate(self.parameters)}
        shapes = {name: weight.shape for name, weight in self.named.items()}
        kinds = state_names(settings(name, **more), shapes, {"weight 0"})
        self.state = DTensorShards(self.named, self.optimizer, kinds, replica=(0, 1))
        self.scale = 1.0
        self._draw = torch.Generator().manual_seed(1)

    def problems(self, rate: float, after=lambda: None, working=lambda master: master) -> list[str]:
        """Step, then call `after`; what is found, with masters as `working` changes them."""
        set_learning_rate(self.optimizer, rate)
        masters = [working(master) for master in self.state.masters()]
        self.state.masters = lambda: iter(masters)
        update = FirstUpdate(self.state, self.name)
        del self.state.masters
        for weight in self.parameters[:-1]:
            gradient = torch.randn(weight.shape, generator=self._draw) * (torch.arange(weight.numel()) % 3).view_as(
                weight
            )
            weight.grad = gradient.to(weight.dtype) * self.scale
        update.before(self.optimizer)
        self.optimizer.step()
        after()
        update.after(self.optimizer)
        return update.problems(update.differences().tolist())


@pytest.mark.parametrize(("name", "more"), [*EXACT, *((name, {}) for name in OPTIMIZERS if (name, {}) not in EXACT)])
@pytest.mark.parametrize("rates", [RATES, [1e-9, 1e-12], [1e30]])
def test_right_updates_pass(name, more, rates):
    training = Training(name, ours(name, **more), **more)
    assert [training.problems(rate) for rate in rates] == [[]] * len(rates)


def test_moves_below_the_last_digit_pass():
    training = Training("sgd", ours("sgd"))
    training.scale = 1e-12
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0.0
    assert training.problems(0.01) == []


def test_values_that_overflow_are_left_to_the_next_loss():
    assert Training("adamw", ours("adamw")).problems(1e38) == []


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_right_updates_of_torch_pass(name):
    training = Training(name, REFERENCES[name])
    assert [training.problems(rate) for rate in RATES] == [[]] * len(RATES)


@pytest.mark.parametrize(("name", "more"), [*EXACT, ("muon", {}), ("adafactor", {}), ("adamw_8bit", {})])
@pytest.mark.parametrize("earlier", [0, 3])
def test_an_update_that_is_not_applied(name, more, earlier):
    training = Training(name, ours(name, **more), **more)
    for rate in RATES[:earlier]:
        training.problems(rate)
    before = [weight.detach().clone() for weight in training.parameters]
    (problem,) = training.problems(0.01, after=lambda: put(training, before))
    assert "no weight moved" in problem or "but it moved by 0" in problem


@pytest.mark.parametrize(("name", "more"), EXACT)
@pytest.mark.parametrize("earlier", [0, 3])
def test_an_update_that_is_applied_twice(name, more, earlier):
    training = Training(name, ours(name, **more), **more)
    for rate in RATES[:earlier]:
        training.problems(rate)
    (problem,) = training.problems(0.01, after=training.optimizer.step)
    assert f"optimizer.name: {name} should move a value by" in problem


def test_a_far_too_large_step_of_muon():
    training = Training("muon", ours("muon"))
    (problem,) = training.problems(0.01, after=lambda: training.parameters[0].data.add_(0.1))
    assert "muon should move a value by" in problem and "weight 0" in problem


def test_a_copy_of_another_weight():
    """As where masters are written to other places than those that the weights are cast from."""
    training = Training("adamw", ours("adamw"))
    other = training.named["weight 1"]

    def exchanged(master):
        return master._replace(working=lambda: -other.detach()) if master.name == "weight 1" else master

    (problem,) = training.problems(0.01, working=exchanged)
    assert problem == "the weights that the model computes with are not the optimizer's: weight 1"


def put(training: Training, values: list[torch.Tensor]) -> None:
    for weight, value in zip(training.parameters, values, strict=True):
        weight.data.copy_(value)
