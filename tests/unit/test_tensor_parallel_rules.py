"""What a recipe may not ask of tensor parallelism, and what the same recipe may ask of other strategies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from samecurve.specs.tasks import TASKS
from samecurve.strategy.validate_tensor_parallel import RULES

GOOD = {
    "task": "pretrain",
    "precision": "fp32",
    "adapter.name": None,
    "fp8": "off",
    "model.kernels": "torch",
    "loss.implementation": "auto",
    "compile": "off",
    "memory.activation_checkpointing": "none",
    "memory.gradient_sync": "auto",
    "optimizer.name": "adamw",
}


def findings(size: int = 2, **changes) -> list[tuple[str, str]]:
    values, strategy = GOOD | changes, SimpleNamespace(tensor_parallel_size=size)
    return [finding for rule in RULES for finding in rule(values.__getitem__, strategy)]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_tasks(task):
    refused = [key for key, _ in findings(task=task)]
    assert refused == ([] if task in ("pretrain", "sft") else ["task"])


def test_what_is_off_may_be_written_without_quotes():
    """YAML reads it as false, as in recipes/base.yaml."""
    assert not findings(fp8=False, compile=False) and not findings(compile="auto")
    ((_, text),) = findings(compile="full")
    assert text.endswith("use off or auto or null, or configs/fsdp.yaml")


def test_adapters_are_refused_with_the_reason_and_a_way_out():
    ((key, text),) = findings(**{"adapter.name": "lora"})
    assert key == "adapter.name"
    assert text.startswith("found lora, but an adapter's matrices") and text.endswith("use null, or configs/fsdp.yaml")


def test_other_strategies_are_free():
    assert not findings(1, **{"adapter.name": "lora", "optimizer.name": "muon", "task": "dpo", "compile": "full"})
