"""Regions of live tensors: what a single process and DDP save. The sharded ones are compared in tests/distributed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from samecurve.accelerator.sharded_state import DTensorShards, state_of
from samecurve.config.schema import Optimizer
from samecurve.interfaces.region import Region
from samecurve.optim.factory import build_optimizer, factor_shapes, state_names
from samecurve.optim.parameter_groups import Roles, parameter_groups
from samecurve.specs.optimizers import OPTIMIZERS

KAHAN = "adamw_bf16, kahan"


def made(replica=(0, 1), saved=None, name="adamw"):
    shape = (96, 64) if name == "adamw_8bit" else (2, 3)  # what is small keeps fp32 states
    parameters = {
        "a": nn.Parameter(torch.arange(math.prod(shape)).float().reshape(shape)),
        "b": nn.Parameter(torch.tensor([7.0])),
    }
    kahan, name = name == KAHAN, name.partition(",")[0]
    settings = Optimizer(name=name, learning_rate=0.1, bf16_rounding="kahan" if kahan else "stochastic")
    if name == "adamw_bf16":
        for parameter in parameters.values():
            parameter.data = parameter.data.bfloat16()
    shapes, roles = {name: parameter.shape for name, parameter in parameters.items()}, Roles(*[frozenset("a")] * 2)
    optimizer = build_optimizer(parameter_groups(parameters.items(), settings, roles), settings)
    states, factors = state_names(settings, shapes, roles.matrices), factor_shapes(settings, shapes)
    return parameters, optimizer, DTensorShards(parameters, optimizer, states, replica, saved, factors)


def update(parameters, optimizer):
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_replicas_hold_all_and_save_a_part_each():
    first, second = (made((rank, 2))[2].ranges() for rank in (0, 1))
    assert first == [("a", Region(0, 6), range(3)), ("b", Region(0, 1), range(0))]
    assert second == [("a", Region(0, 6), range(3, 6)), ("b", Region(0, 1), range(1))]


def test_a_second_copy_is_held_and_not_saved():
    state = made(saved={"b"})[2]
    assert [(held.name, len(held.saved)) for held in state.ranges()] == [("a", 0), ("b", 1)]


@pytest.mark.parametrize("name", [*OPTIMIZERS, KAHAN])
def test_what_is_visited_is_what_the_optimizer_uses(name):
    parameters, optimizer, state = made(name=name)
    update(parameters, optimizer)
    visited = {(held.name, kind): tensor.clone() for held, kind, tensor in state.visit()}
    assert sorted(visited) == sorted((name, kind) for name in state.kinds for kind in state.kinds[name])
    for name, parameter in parameters.items():
        assert torch.equal(visited[name, "weight"], parameter.detach().flatten())
        kept = {
            key: value for key, value in optimizer.state[parameter].items() if key not in ("step", "qmap1", "qmap2")
        }
        assert len(kept) == len(state.kinds[name]) - 1 + sum(factor.startswith(f"{name}.") for factor in state.factors)
        for kind, value in kept.items():
            found = visited[name, kind] if (name, kind) in visited else visited[f"{name}.{kind}", "factor"]
            assert (value.any() or kind == "compensation") and torch.equal(found, value.flatten())


def test_reading_before_the_first_update_gives_zeros_and_leaves_no_state():
    parameters, optimizer, state = made()
    moments = [tensor for _, kind, tensor in state.visit() if kind != "weight"]
    assert len(moments) == 4 and not any(tensor.any() for tensor in moments)
    assert not optimizer.state


@pytest.mark.parametrize(("setting", "device"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")])
def test_adams_counter_is_where_its_kernel_reads_it(setting, device):
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    optimizer.defaults[setting] = True  # Adam itself refuses some without a GPU
    assert state_of(optimizer, parameter, ("exp_avg", "exp_avg_sq"), create=True)["step"].device.type == device


@pytest.mark.parametrize("name", [*OPTIMIZERS, KAHAN])
def test_what_is_written_is_gone_on_from(name):
    """Ten updates at once, or five, a copy into a fresh optimizer, and five more: the same bits."""
    whole, copied = made(name=name), made(name=name)
    for _ in range(5):
        update(*whole[:2])
    values = {(held.name, kind): tensor.clone() for held, kind, tensor in whole[2].visit()}
    with torch.no_grad():
        for held, kind, tensor in copied[2].visit(writing=True):
            tensor.copy_(values[held.name, kind])
    copied[2].finish(5)
    for parameters, optimizer, _ in (whole, copied):
        for _ in range(5):
            update(parameters, optimizer)
    assert all(torch.equal(whole[0][name], copied[0][name]) for name in whole[0])
