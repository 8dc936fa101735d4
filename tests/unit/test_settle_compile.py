"""`compile: auto` at a run's start: by which rule, who decides, and what the header shows."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from samecurve.config import loader
from samecurve.planner import inputs, strategies
from samecurve.planner.strategies import read
from samecurve.strategy.plan import Strategy
from samecurve.strategy.validate import AUTO_COMPILE_STEPS, choose_compile
from samecurve.training import settle

RECIPE = "recipes/quickstart.yaml"


def strategy_of(name: str) -> Strategy:
    strategy, problems = strategies.describe(inputs.read(RECIPE, []), read(f"configs/{name}.yaml"), {}, 2)
    assert not problems or name == "fsdp_ep"  # the quickstart's model has no experts
    return strategy


@dataclass(frozen=True)
class Planned:
    recipe: Any
    strategy: Strategy


@dataclass(frozen=True)
class Started:
    """What settle_compile reads of a Context."""

    plan: Planned
    accelerator: Any
    world: Any
    compile_choice: str = ""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(settle, "compiler_problems", lambda *_: iter(()))
    monkeypatch.setattr(settle, "read_state", lambda _: {"step": 30})


def settled(value: str, steps: int = 1020, resumed_from: str | None = None, on_main=lambda choose: choose()) -> Started:
    recipe = loader.load_recipe(RECIPE, [f"compile={value}", f"steps={steps}"])
    planned = Planned(recipe, strategy_of("ddp"))
    started = Started(planned, SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(on_main=on_main))
    checkpoints = SimpleNamespace(resumed_from=resumed_from)
    return cast(Started, settle.settle_compile(cast(Any, started), cast(Any, checkpoints)))


@pytest.mark.parametrize(
    ("strategy", "steps", "choice"),
    [
        ("ddp", AUTO_COMPILE_STEPS - 1, ("off", "999 steps are left, fewer than 1,000")),
        ("ddp", AUTO_COMPILE_STEPS, ("regional", "1,000 steps are left, at least 1,000")),
        ("pipeline_1f1b", 10**6, ("regional", "1,000,000 steps are left, at least 1,000")),
        ("zero3", 10**6, ("off", "zero3 cannot be compiled")),
        ("fsdp_ep", 10**6, ("off", "fsdp_ep cannot be compiled")),
        ("pipeline_zbv", 10**6, ("off", "pipeline_zbv cannot be compiled")),
    ],
)
def test_auto_compiles_many_steps_where_it_may(strategy, steps, choice):
    assert choose_compile(strategy_of(strategy), steps) == choice


@pytest.mark.parametrize(("resumed_from", "kind", "left"), [(None, "regional", "1,020"), ("checkpoint", "off", "990")])
def test_by_the_steps_that_are_left(resumed_from, kind, left):
    context = settled("auto", resumed_from=resumed_from)
    assert context.plan.recipe.compile == kind
    assert context.compile_choice.startswith(f"{kind} (auto): {left} steps are left")


def test_all_ranks_take_the_answer_of_rank_0():
    context = settled("auto", on_main=lambda choose: ("off", "rank 0 says so"))
    assert (context.plan.recipe.compile, context.compile_choice) == ("off", "off (auto): rank 0 says so")


def test_nothing_is_compiled_without_a_compiler(monkeypatch):
    monkeypatch.setattr(settle, "compiler_problems", lambda *_: iter(("compile: no C++ compiler; install g++",)))
    assert settled("auto").compile_choice == "off (auto): no C++ compiler; install g++"


@pytest.mark.parametrize("value", ["off", "regional"])
def test_other_values_stay(value):
    context = settled(value)
    assert (context.plan.recipe.compile, context.compile_choice) == (value, "")
