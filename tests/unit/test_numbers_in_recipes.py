"""What no number in a recipe may be: not a number, infinite, beyond what is counted with, negative."""

from __future__ import annotations

import math

import pytest
from pydantic import BaseModel
from report_cases import message, write

from samecurve.config import rules_model
from samecurve.config.schema import Recipe
from samecurve.config.source import schema_paths

# A number of any size is meant there: it switches something off, or is one side of a ratio; a learning rate that no
# model survives ends the run with 5 (numeric).
ANY_SIZE = {
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.groups.*.learning_rate",
    "optimizer.groups.*.weight_decay",
    "optimizer.max_grad_norm",
    "numerics.rollback_ratio",
    "evaluate.min_improvement",
    "data.mixture.*.weight",
    "dpo.desirable_weight",
    "dpo.undesirable_weight",
    "dpo.beta",
    "dpo.gamma",
    "reward.center_rewards_coefficient",
    "embed.temperature",
    "distill.temperature",
    "memory.limit_gib",
}


def numbers() -> dict[str, str]:
    """The keys that hold numbers, and an override with a {} in place of one."""
    found = {}
    for path in schema_paths(Recipe):
        *blocks, last = (part for part in path if part != "*")
        model = Recipe
        for block in blocks:
            annotation = model.model_fields[block].annotation
            model = annotation if isinstance(annotation, type) else inner(annotation)
        kind = str(model.model_fields[last])
        if "int" not in kind.replace("Constraints", "") and "float" not in kind:
            continue
        dotted = ".".join(path)
        if path[:2] == ("optimizer", "groups"):
            text = f'optimizer.groups=[{{pattern: "*", {last}: {{}}}}]'
        elif "*" in path:
            text = f"data.mixture=[{{path: text.txt, weight: 1, {last}: {{}}}}]".replace("weight: 1, weight", "weight")
        else:
            text = f"{dotted}=" + ("[{}, {}]" if "tuple[" in kind else "{}")
        found[dotted] = text
    return found


def inner(annotation) -> type[BaseModel]:
    while not isinstance(annotation, type):
        annotation = annotation.__args__[0]
    return annotation


NUMBERS = numbers()


def test_all_of_them():
    assert len(NUMBERS) > 35 and ANY_SIZE <= NUMBERS.keys()
    assert {"steps", "optimizer.betas", "profile.ranks", "schedule.decay_steps"} <= NUMBERS.keys()
    assert not {"task", "output_dir", "data.path", "data.chat", "adapter.name"} & NUMBERS.keys()


@pytest.mark.parametrize("value", [".nan", "nan", ".inf", "-.inf", "1e999", "-1", "-0.5", f"1{'0' * 30}", "1e30"])
def test_numbers_mean_something(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    accepted = set()
    for key, text in NUMBERS.items():
        found = message(tmp_path, ["r.yaml", text.replace("{}", value)], {})
        lines = found[0].splitlines() if isinstance(found, tuple) else []
        refused = [line for line in lines if f" {key.partition('.*')[0]}" in line and " expected " in line]
        accepted |= set() if refused else {key}
    assert accepted == (ANY_SIZE if value in (f"1{'0' * 30}", "1e30") else set())


def test_an_integer_that_no_float_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    found, code = message(tmp_path, ["r.yaml", f"optimizer.learning_rate=1{'0' * 400}", f"steps={'9' * 5000}"], {})
    assert code == 2 and "command line: optimizer.learning_rate: found an integer of 1329 bits" in found
    assert 'command line: steps: found "9999' in found and "remove the quotes" not in found


def test_infinity_in_a_list_of_the_model_may_be_meant():
    given = {"model_type": "mamba2", "time_step_limit": [0.0, math.inf], "initializer_range": math.inf}
    problems = dict(rules_model._numbers({"model.config": given}.get))
    assert problems.keys() == {"model.config.initializer_range"}
