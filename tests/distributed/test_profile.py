"""A run of which steps are recorded trains the same, and the record says what its ranks exchanged."""

from __future__ import annotations

import json

import pytest
from harness import largest_relative_difference, long

STEPS = "profile.steps=[3,5]"


def profiled(workspace, strategy):
    run = workspace.run(strategy, 2, STEPS, "profile.ranks=[0,1]")
    assert run.returncode == 0, run.output
    folder = run.directory / "profile"
    return run, folder, json.loads((folder / "summary.json").read_text())


def test_ddp(workspace, reference):
    run, folder, content = profiled(workspace, "ddp")
    assert run.facts["engine"] == "DistributedDataParallel"
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < 1e-5
    traces = folder / "step_00000003"
    assert sorted(path.name for path in traces.iterdir()) == [f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)]
    assert (content["steps"], content["rank"]) == ([3, 4, 5], 0)
    assert sum(content["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert content["shares"]["communication"] > 0 and content["shares"]["optimizer"] > 0
    # fp32 gradients once a step, and a few numbers that the ranks agree on
    (reduced,) = (each for each in content["collectives"] if each["name"] == "all_reduce")
    gradients = 4 * run.facts["num_trained_parameters"]
    assert 0 <= reduced["num_bytes"] / 3 - gradients < 200
    assert reduced["calls"] >= 3 and 0 < reduced["seconds"] < content["seconds"]
    memory = content["memory_bytes"]
    assert memory["gradients"] == gradients
    assert gradients <= memory["weights"] < gradients + 1000  # and rotary's frequencies
    assert 2 * gradients <= memory["optimizer"] < 2 * gradients + 1000  # and a step counter per weight
    # DDP's buckets, in which gradients lie, are there before the step
    assert memory["activations"] == content["allocated_bytes"]["cpu"] > 0
    assert "profile of steps 3 to 5: " in run.output
    assert run.output.count("summary in") == 1


def test_deepspeeds_own_log(workspace):
    """Its calls are those that PyTorch's profiler saw, but for what does not go through DeepSpeed."""
    _, folder, content = profiled(workspace, workspace.strategy("zero3", comms_logger={"enabled": True}))
    seen = {each["name"]: each for each in content["collectives"]}
    for name, logged in (("all_gather", "all_gather_into_tensor"), ("reduce_scatter", "reduce_scatter_tensor")):
        found = [each for each in content["logged_by_deepspeed"] if each["name"].startswith(logged)]
        assert 0 < sum(each["calls"] for each in found) <= seen[name]["calls"]
        assert 0 < sum(each["seconds"] for each in found) < content["seconds"]
        assert all(each["calls"] % len(content["steps"]) == 0 for each in found)
    assert "DeepSpeed's own log, per step" in (folder / "summary.txt").read_text()


# bytes per weight that a rank holds whole, and per weight that two ranks share
BYTES = {"fsdp": (12, 0), "zero1": (4, 12), "zero2": (4, 12), "zero3": (4, 12), "pipeline": (4 + 12, 0)}


@pytest.mark.parametrize("strategy", long(*BYTES))
def test_every_engine(strategy, workspace):
    run, _, content = profiled(workspace, strategy)
    assert sum(content["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert min(content["shares"][kind] for kind in ("matmul", "communication", "optimizer")) > 0
    assert all(each["num_bytes"] > 0 and each["seconds"] > 0 for each in content["collectives"])
    # a weight and two moments, and the fp32 master that DeepSpeed keeps beside the weight, even where that is fp32
    memory, (per_rank, per_both) = content["memory_bytes"], BYTES[strategy]
    expected = run.facts["num_parameters_per_rank"] * per_rank + run.facts["num_trained_parameters"] / 2 * per_both
    assert memory["weights"] + memory["optimizer"] == pytest.approx(expected, rel=0.03)
