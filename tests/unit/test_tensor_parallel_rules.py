"""What a recipe may not ask of tensor parallelism, and what the same recipe may ask of other strategies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from samecurve.config.documents import Document
from samecurve.specs.tasks import TASKS
from samecurve.strategy.validate_tensor_parallel import RULES, check_accelerate

GOOD = {
    "task": "pretrain",
    "precision": "fp32",
    "adapter.dora": False,
    "fp8": "off",
    "model.kernels": "torch",
    "loss.implementation": "auto",
    "compile": "off",
    "memory.gradient_sync": "auto",
    "optimizer.name": "adamw",
    "batch.sequence_length": 30,
    "data.group_by_length": False,
}


def findings(size: int = 2, cuts_sequence: bool = False, **changes) -> list[tuple[str, str]]:
    values = GOOD | changes
    strategy = SimpleNamespace(tensor_parallel_size=size, tp_sequence_parallel=cuts_sequence, path="tp.yaml")
    return [finding for rule in RULES for finding in rule(values.__getitem__, strategy)]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_tasks(task):
    refused = [key for key, _ in findings(task=task)]
    assert refused == (["task"] if task == "mlm" else [])


def test_what_is_off_may_be_written_without_quotes():
    """YAML reads it as false, as in recipes/base.yaml."""
    assert not findings(fp8=False, compile=False) and not findings(compile="auto")
    ((_, text),) = findings(compile="full")
    assert text.endswith("use off, auto, regional or null, or configs/fsdp.yaml")


def test_dora_is_refused_with_the_reason_and_a_way_out():
    assert not findings(**{"adapter.name": "lora"})
    ((key, text),) = findings(**{"adapter.dora": True})
    assert key == "adapter.dora"
    assert text.startswith("found true, but DoRA's norms") and text.endswith("use false, or configs/fsdp.yaml")


def test_other_strategies_are_free():
    assert not findings(1, **{"adapter.dora": True, "optimizer.name": "muon", "task": "dpo", "compile": "full"})


def test_a_sequence_has_to_divide():
    assert not findings(2, cuts_sequence=True) and not findings(4)
    ((key, text),) = findings(4, cuts_sequence=True)
    assert key == "batch.sequence_length" and text.startswith("found 30, which cannot be divided over 4 ranks (tp.yaml")


def test_rows_grouped_by_length_have_to_divide():
    """Their widths are multiples of 128 (data.datasets.base), whatever the sequence length is."""
    grouped = {"data.group_by_length": True, "batch.sequence_length": 768}
    assert not findings(4, cuts_sequence=True, **grouped) and not findings(3, **grouped)
    ((key, text),) = findings(3, cuts_sequence=True, **grouped)
    assert key == "data.group_by_length" and "multiples of 128 tokens, which cannot be divided over 3 ranks" in text


@pytest.mark.parametrize(("kind", "size", "wrong"), [("FSDP", 2, 0), ("FSDP", None, 1), ("MULTI_GPU", 1, 1)])
def test_only_tensor_parallelism_cuts_sequences(kind, size, wrong):
    block = {"parallelism_config_tp_sequence_parallel": True}
    block |= {} if size is None else {"parallelism_config_tp_size": size}
    document = Document("my.yaml", {"distributed_type": kind, "parallelism_config": block})
    check_accelerate(document)
    assert len(document.problems) == wrong
