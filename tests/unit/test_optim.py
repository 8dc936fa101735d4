from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from samecurve.config.schema import Optimizer, Schedule
from samecurve.optim.factory import build_optimizer, parameter_groups
from samecurve.optim.schedule import learning_rate, set_learning_rate

PEAK = 0.01


def recipe(steps: int = 20, **schedule) -> SimpleNamespace:
    return SimpleNamespace(
        steps=steps, schedule=Schedule(**schedule), optimizer=Optimizer(learning_rate=PEAK, weight_decay=0.5)
    )


@pytest.mark.parametrize(
    ("schedule", "update", "expected"),
    [
        ({"name": "constant", "warmup_steps": 4}, 1, PEAK / 4),
        ({"name": "constant", "warmup_steps": 4}, 4, PEAK),
        ({"name": "constant", "warmup_steps": 4}, 20, PEAK),
        ({"name": "constant"}, 1, PEAK),
        ({"name": "linear", "warmup_steps": 4, "min_lr_ratio": 0.0}, 12, PEAK * 0.5),  # half way from 4 to 20
        ({"name": "linear", "warmup_steps": 4, "min_lr_ratio": 0.2}, 20, PEAK * 0.2),
        ({"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1}, 4, PEAK),
        ({"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1}, 12, PEAK * 0.55),  # cos(pi/2) = 0
        ({"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1}, 20, PEAK * 0.1),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 8, "min_lr_ratio": 0.0}, 12, PEAK),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 8, "min_lr_ratio": 0.0}, 18, PEAK * 0.25),  # 6 of 8 decayed
    ],
)
def test_rates_worked_out_by_hand(schedule, update, expected):
    assert learning_rate(recipe(**schedule), update) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_rates_of_transformers(name):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    reference = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, 5),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, 5, 20),
        "cosine": lambda: get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, 20, min_lr_rate=0.1),
        "wsd": lambda: get_wsd_schedule(optimizer, 5, 8, num_training_steps=20, decay_type="linear"),
    }[name]()
    rule = reference.lr_lambdas[0]
    made = recipe(
        name=name, warmup_steps=5, decay_steps=8 if name == "wsd" else None, min_lr_ratio=0.1 if name == "cosine" else 0
    )
    for update in range(1, 21):
        assert learning_rate(made, update) == pytest.approx(PEAK * rule(update), rel=1e-9, abs=1e-12), update


def test_decay_applies_to_matrices_only_and_by_hand():
    """AdamW without a gradient shrinks a decayed weight by the factor 1 - rate * decay, and no other."""
    matrix, bias = torch.nn.Parameter(torch.full((1, 2), 2.0)), torch.nn.Parameter(torch.full((2,), 2.0))
    shapes = {"layer.weight": matrix.shape, "layer.bias": bias.shape}
    groups = parameter_groups([("layer.weight", matrix), ("layer.bias", bias)], shapes, recipe().optimizer)
    optimizer = build_optimizer(groups, recipe().optimizer)
    set_learning_rate(optimizer, 0.1)
    matrix.grad, bias.grad = torch.zeros_like(matrix), torch.zeros_like(bias)
    optimizer.step()
    assert matrix.tolist() == [[pytest.approx(2.0 * (1 - 0.1 * 0.5))] * 2]
    assert bias.tolist() == [2.0, 2.0]


def test_first_adam_update_by_hand():
    """The first bias-corrected Adam step is the rate times g / (|g| + epsilon)."""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    groups = parameter_groups([("bias", weight)], {"bias": weight.shape}, recipe().optimizer)
    optimizer = build_optimizer(groups, recipe().optimizer)
    set_learning_rate(optimizer, 0.01)
    weight.grad = torch.tensor([-3.0])
    optimizer.step()
    assert weight.item() == pytest.approx(1.0 + 0.01 * 3 / (3 + 1e-8), rel=1e-6)


def test_sharded_shapes_are_not_asked():
    """Under ZeRO-3 a matrix looks empty and one-dimensional; the group goes by its full shape."""
    looks_flat = torch.nn.Parameter(torch.zeros(0))
    (group,) = parameter_groups([("w", looks_flat)], {"w": torch.Size([4, 4])}, recipe().optimizer)
    assert group["weight_decay"] == 0.5


def test_cosine_is_monotone_after_warmup():
    rates = [learning_rate(recipe(name="cosine", warmup_steps=3), update) for update in range(3, 21)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False)) and math.isclose(rates[0], PEAK)
