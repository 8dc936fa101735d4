"""The planner's bytes of tensors beside those of real runs, under every strategy whose memory is not the host's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness import launch_command, long

from samecurve.bench.strategy_variants import write_changed
from samecurve.planner import job_record, memory

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SETTINGS = ("steps=6", "schedule.warmup_steps=0", "evaluate.every_steps=0", "checkpoint.every_steps=0")
SETTINGS += ("export.enabled=false", "batch.micro_batch_size=2", "batch.sequence_length=128")
# The shipped buckets, up to 2 GB, would be nearly all of the bytes.
SMALL_BUCKETS = tuple(f"zero_optimization.{kind}_bucket_size=400000" for kind in ("reduce", "allgather"))
TWO = ("ddp", "zero1", "zero2", "zero3", "pipeline", "tp", "fsdp_cp", "fsdp_ulysses", "pipeline_gpipe", "pipeline_1f1b")
TWO += ("pipeline_interleaved", "pipeline_zbv", "pipeline_dualpipev")
FOUR = ("hsdp", "fsdp_tp", "fsdp_tp_cp", "pipeline_fsdp", "zero3_hpz")
CASES = [("fsdp", 2), *long(*((name, 2) for name in TWO), *((name, 4) for name in FOUR), ("pp_fsdp_tp", 8))]
# PyTorch's zero-bubble schedule keeps more than activations between the halves of a backward pass. hpZ: not known.
LIMITS = {"pipeline_zbv": (-0.15, 0.0), "zero3_hpz": (0.0, 0.1)}


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_the_bytes_of_tensors_are_the_planners(strategy, world, workspace):
    path, output_dir = workspace.strategy(strategy), workspace.folder / f"bytes_{strategy}"
    if strategy == "pipeline" or strategy.startswith("zero"):
        path = write_changed(path, SMALL_BUCKETS, workspace.folder / f"small_{strategy}")
    program = str(Path(__file__).with_name("tensor_bytes_probe.py"))
    command = launch_command("fork", path, world, workspace.folder, program)
    arguments = [f"model.config={json.dumps(CONFIG)}", f"output_dir={output_dir}", *SETTINGS, "--strategy", str(path)]
    run = workspace.execute([*command, str(workspace.recipe), *arguments], output_dir)
    assert run.returncode == 0, run.output
    assert (run.facts["strategy"], run.facts["world_size"]) == (strategy, world)
    found = [json.loads(line.split("BYTES ", 1)[1]) for line in run.output.splitlines() if "BYTES " in line]
    # the least of three steps: a thread of gloo may let go of a buffer later, and out of the profiler's sight
    of_first_rank = [each["peak"] for each in found if each["rank"] == 0]
    assert len(of_first_rank) == 3
    job = replace(job_record.job(run.facts["predicted"]["job"]), calibration=None)
    predicted = memory.anatomy(job)[0]
    assert predicted.stage.index == 0
    low, high = LIMITS.get(strategy, (-0.05, 0.05))
    error = predicted.peak / min(of_first_rank) - 1
    print(f"{strategy}: {min(of_first_rank):,} bytes of tensors, predicted {error:+.1%}")
    assert low < error < high, [each for each in predicted.lines if each.backward or each.forward]
