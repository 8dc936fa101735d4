"""`compile: auto` at a run's start: who decides, by how many steps, and what the header shows."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from samecurve.config import loader
from samecurve.training import startup

WHY = "compiling would save 9 s"


@dataclass(frozen=True)
class Planned:
    recipe: Any


@dataclass(frozen=True)
class Started:
    """What settle_compile reads of a Context."""

    plan: Planned
    accelerator: Any
    world: Any
    compile_choice: str = ""


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The numbers of steps that the planner was asked about; it answers regional."""
    steps: list[int] = []

    def choice(plan, fields, device, left):
        steps.append(left)
        return "regional", WHY

    monkeypatch.setattr(startup.forecast, "compile_choice", choice)
    monkeypatch.setattr(startup, "_device", lambda *_: None)
    monkeypatch.setattr(startup, "compiler_problems", lambda *_: iter(()))
    monkeypatch.setattr(startup, "read_state", lambda _: {"step": 30})
    return steps


def settled(compile_value: str, resumed_from: str | None = None, on_main=lambda choose: choose()) -> Started:
    recipe = loader.load_recipe("recipes/quickstart.yaml", [f"compile={compile_value}", "steps=100"])
    started = Started(Planned(recipe), SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(on_main=on_main))
    built = SimpleNamespace(skeleton=SimpleNamespace(config=SimpleNamespace(to_dict=dict)))
    found = startup.settle_compile(
        cast(Any, started), cast(Any, built), cast(Any, SimpleNamespace(resumed_from=resumed_from))
    )
    return cast(Started, found)


@pytest.mark.parametrize(("resumed_from", "left"), [(None, 100), ("checkpoint", 70)])
def test_by_the_steps_that_are_left(resumed_from, left, asked):
    found = settled("auto", resumed_from)
    assert asked == [left] and found.plan.recipe.compile == "regional"
    assert found.compile_choice == f"regional (auto): {WHY}"


def test_all_ranks_take_the_answer_of_rank_0(asked):
    found = settled("auto", on_main=lambda choose: ("off", "rank 0 says so"))
    assert not asked and (found.plan.recipe.compile, found.compile_choice) == ("off", "off (auto): rank 0 says so")


def test_nothing_is_compiled_without_a_compiler(asked, monkeypatch):
    monkeypatch.setattr(startup, "compiler_problems", lambda *_: iter(("compile: no C++ compiler; install g++",)))
    found = settled("auto")
    assert not asked and found.compile_choice == "off (auto): no C++ compiler; install g++"


@pytest.mark.parametrize("value", ["off", "regional"])
def test_other_values_stay(value, asked):
    found = settled(value)
    assert not asked and (found.plan.recipe.compile, found.compile_choice) == (value, "")
