"""fp16 with loss scaling, where a CPU can: one process, DDP and FSDP2. DeepSpeed trains fp16 on accelerators only."""

from __future__ import annotations

import pytest
from harness import largest_relative_difference, long, relative_l2


@pytest.mark.parametrize("strategy", [None, "fsdp", *long("ddp")])
def test_follows_the_fp32_reference(strategy, workspace, reference):
    """fp16 keeps 11 bits, eight times bf16's, so it follows the fp32 trajectory that much closer."""
    world = 1 if strategy is None else 2
    run = workspace.run(strategy, world, "precision=fp16", "batch.micro_batch_size=2")
    assert run.returncode == 0, run.output
    assert run.facts["precision"] == "fp16" and run.facts["weight_dtype"] == "float32"
    assert run.metrics[-1]["skipped_steps"] == 0
    loss = largest_relative_difference(run.column("loss"), reference.column("loss"))
    assert 1e-8 < loss < 1e-3  # not the fp32 run in disguise, which is what Accelerate makes of fp16 on a CPU
    assert largest_relative_difference(run.column("grad_norm"), reference.column("grad_norm")) < 1e-2
    assert relative_l2(run.weights, reference.weights) < 1e-2


def test_deepspeed_is_refused_with_the_reason(workspace):
    run = workspace.run("zero2", 2, "precision=fp16", "batch.micro_batch_size=2")
    assert run.returncode == 1 and not run.directory.exists()
    assert "DeepSpeed trains in fp16 on accelerators only" in run.output
