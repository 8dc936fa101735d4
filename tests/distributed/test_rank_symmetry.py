"""Nobody waits: garbage goes on all ranks after the same steps, gradients are sent once a step, and what that costs."""

from __future__ import annotations

import json

import pytest
from harness import long

SCHEDULE = ("steps=13", "memory.garbage_collection_steps=4", "evaluate.every_steps=6", "checkpoint.every_steps=5")
AFTER = [1, 4, 5, 6, 8, 10, 12]
CASES = {
    "auto": {"memory": {"gradient_sync": "auto"}},
    "last_micro_batch": {"memory": {"gradient_sync": "last_micro_batch"}},
}
SMALL = 10_000  # bytes: what else a step leaves, of which not all has a Python object at every moment


def probe(workspace, strategy: str, cases: dict, world: int = 2) -> tuple[dict, list]:
    overrides = [*SCHEDULE, "precision=bf16", f"batch.micro_batch_size={4 // world}"]
    overrides += [f"output_dir={workspace.folder / f'even_{strategy}'}"]
    return workspace.probe("rank_symmetry_probe.py", strategy, world, *overrides, CASES=json.dumps(cases))


def assert_collected(of_all: list) -> None:
    """In the last step Python has it back."""
    first, *others = ([noted for noted in seen if noted[0] < 13] for seen in of_all)
    assert others and all(other == first for other in others)
    assert [step for step, _, _ in first] == AFTER
    assert not any(by_itself for _, by_itself, _ in first)
    assert not any(held for _, _, held in first[1:])  # nothing large waits for the schedule


@pytest.mark.parametrize(("strategy", "world"), long(("fsdp", 2), ("hsdp", 4)))
def test_gradients_that_wait(strategy, world, workspace):
    """In two shards, both times."""
    found, collected = probe(workspace, strategy, CASES, world)
    assert_collected(collected)
    whole = found["last_micro_batch"]["said"]
    assert whole > 10 * SMALL
    assert found["auto"]["said"] == 0 and found["auto"]["said_of_all"] == pytest.approx(whole / 2, abs=SMALL)
    for case in found.values():
        assert case["held"] == pytest.approx(case["said_of_all"], abs=SMALL)
    assert found["last_micro_batch"]["said_of_all"] == whole
    # from the same weights, gradients differ by the order of sums in fp32; then bf16 rounds what it computes
    assert found["last_micro_batch"]["norm"][0] == pytest.approx(found["auto"]["norm"][0], rel=1e-5)
    assert found["last_micro_batch"]["loss"] == pytest.approx(found["auto"]["loss"], rel=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", *long("zero2", "zero3", "pipeline")])
def test_collected_together_under(strategy, workspace):
    assert_collected(probe(workspace, strategy, {})[1])
