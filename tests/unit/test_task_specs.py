"""The facts about tasks are those of the tasks."""

from __future__ import annotations

import json
from importlib import import_module
from typing import get_args

import pytest

from samecurve.config import loader
from samecurve.config.schema import Recipe
from samecurve.config.section import Section
from samecurve.errors import ConfigurationError
from samecurve.specs.tasks import TASKS, readers
from samecurve.tasks.causal_lm import CausalTask
from samecurve.tasks.classify import ClassifyTask, ScoresTask
from samecurve.tasks.distill import DistillTask
from samecurve.tasks.dpo import DpoTask, KtoTask
from samecurve.tasks.embed import EmbedTask
from samecurve.tasks.mlm import MaskedTask
from samecurve.tasks.reward import RewardTask
from samecurve.tasks.token_classify import TokenTask

CLASSES = {
    **dict.fromkeys(("pretrain", "continue_pretrain", "sft"), [CausalTask]),
    "distill": [DistillTask],
    "dpo": [DpoTask, KtoTask],
    "reward": [RewardTask],
    "classify": [ClassifyTask, ScoresTask],
    "token_classify": [TokenTask],
    "process_reward": [TokenTask],
    "mlm": [MaskedTask],
    "embed": [EmbedTask],
}


def test_every_task_of_the_schema_has_its_facts():
    assert list(TASKS) == list(get_args(Recipe.model_fields["task"].annotation)) == list(CLASSES)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_module_and_its_loss_is_what_the_facts_say(name):
    assert callable(import_module(f"samecurve.tasks.{name}").load_task)
    for fact in ("by_token", "by_log_probability"):
        assert {getattr(each, fact) for each in CLASSES[name]} == {getattr(TASKS[name], fact)}


REFUSED = [(task, key, *refusal) for task, spec in TASKS.items() for key, refusal in spec.refuses.items()]


@pytest.mark.parametrize(("task", "key", "value", "reason"), REFUSED)
def test_a_value_that_a_task_cannot_use_is_refused(task, key, value, reason):
    with pytest.raises(ConfigurationError) as caught:
        loader.load_recipe(f"recipes/{task}.yaml", [f"{key}={json.dumps(value)}"])
    assert f"{key}: " in str(caught.value) and f"task {task} {reason}" in str(caught.value)


def test_a_task_alone_refuses_its_values():
    assert len(REFUSED) == 6
    others = ["batch.global_batch_size=1", "data.train_on=all"]
    assert loader.load_recipe("recipes/sft.yaml", others).batch.global_batch_size == 1


def test_keys_that_tasks_read_are_keys_of_a_recipe():
    keys = {key for spec in TASKS.values() for key in spec.reads}
    assert len(keys) > 20
    for key in keys:
        block, name = key.split(".")
        section = Recipe.model_fields[block].annotation
        assert issubclass(section, Section) and name in section.model_fields
        assert 0 < len(readers(key)) < len(TASKS)
