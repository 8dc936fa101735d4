"""The planner's bytes of tensors beside those of real runs, under every strategy whose memory is not the host's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Workspace, launch_command, long

from samecurve.bench.step import write_changed
from samecurve.planner import memory
from samecurve.planner.job import from_json
from samecurve.planner.tensor_lines import MOMENTS

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SETTINGS = ("steps=8", "schedule.warmup_steps=0", "evaluate.every_steps=0", "checkpoint.every_steps=0")
SETTINGS += ("export.enabled=false", "batch.micro_batch_size=2", "batch.sequence_length=128")
# The shipped buckets, up to 2 GB, would be nearly all of the bytes.
SMALL_BUCKETS = tuple(f"zero_optimization.{kind}_bucket_size=400000" for kind in ("reduce", "allgather"))
TWO = ("ddp", "zero1", "zero2", "zero3", "pipeline", "tp", "fsdp_cp", "fsdp_ulysses", "pipeline_gpipe", "pipeline_1f1b")
TWO += ("pipeline_interleaved", "pipeline_zbv", "pipeline_dualpipev")
FOUR = ("hsdp", "fsdp_tp", "fsdp_tp_cp", "pipeline_fsdp", "zero3_hpz")
CASES = [("fsdp", 2), *long(*((name, 2) for name in TWO), *((name, 4) for name in FOUR), ("pp_fsdp_tp", 8))]
# Every expert gets every token, so that their shares do not depend on the router.
EXPERTS = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 4}
# Nothing is gathered ahead, and nothing stays until the backward pass, as in large models.
GATHERS_AGAIN = tuple(
    f"zero_optimization.stage3_{key}=0" for key in ("max_reuse_distance", "max_live_parameters", "prefetch_bucket_size")
)


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_the_bytes_of_tensors_are_the_planners(strategy, world, workspace):
    path = workspace.strategy(strategy)
    if strategy == "pipeline" or strategy.startswith("zero"):
        path = write_changed(path, SMALL_BUCKETS, workspace.folder / f"small_{strategy}")
    compare_bytes(strategy, world, path, workspace)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("zero3", 2), ("zero3_hpz", 4)])
def test_the_bytes_of_weights_that_are_gathered_again(strategy, world, workspace):
    changed = (*SMALL_BUCKETS, *GATHERS_AGAIN)
    path = write_changed(workspace.strategy(strategy), changed, workspace.folder / f"again_{strategy}")
    # their peak is at the loss, which is computed where there are targets: in the least step, of a part of the tokens
    compare_bytes(strategy, world, path, workspace, limit=0.07)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("tp", 2)])
def test_the_bytes_of_whole_logits(strategy, world, workspace):
    compare_bytes(strategy, world, workspace.strategy(strategy), workspace, 0.05, "loss.implementation=full")


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("fsdp", 2), ("fsdp_ep", 2), ("fsdp_ep_tp", 4)])
def test_the_bytes_of_experts(strategy, world, workspace):
    more = f"model.config={json.dumps(EXPERTS)}"
    compare_bytes(strategy, world, workspace.strategy(strategy), workspace, 0.05, more)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero2_offload", "zero3_offload", "zero3_nvme"])
def test_the_bytes_of_what_is_offloaded_are_the_processes_own_on_a_cpu(strategy, workspace):
    """FSDP offloads through pinned memory, which a CPU does not have."""
    path = write_changed(workspace.strategy(strategy), SMALL_BUCKETS, workspace.folder / f"small_{strategy}")
    compare_bytes(strategy, 2, path, workspace)


@pytest.fixture(scope="module")
def base(workspace) -> Path:
    run = workspace.run(None, 1, f"model.config={json.dumps(CONFIG)}", "steps=2", "schedule.warmup_steps=0")
    assert run.returncode == 0, run.output
    return run.directory / "model"


FROZEN = {
    "lora": ("adapter={name: lora, rank: 8, alpha: 8}",),
    "4bit": ("adapter={name: lora, rank: 8, alpha: 8, quantization: 4bit}",),
    "8bit": ("adapter={name: lora, rank: 8, alpha: 8, quantization: 8bit}",),
}


@pytest.mark.parametrize(
    ("kind", "strategy", "precision"),
    [
        *long(*((kind, name, "fp32") for kind in FROZEN for name in ("single", "ddp", "fsdp", "zero2", "zero3"))),
        *long(*((kind, name, "bf16") for kind in FROZEN for name in ("ddp", "fsdp", "zero3"))),
    ],
)
def test_the_bytes_of_frozen_weights(kind, strategy, precision, workspace, base):
    path = workspace.strategy(strategy)
    if strategy.startswith("zero"):
        path = write_changed(path, SMALL_BUCKETS, workspace.folder / f"small_{strategy}")
    # packed: their peak is at the loss, which is computed where there are targets
    more = (*FROZEN[kind], f"precision={precision}", "data.packing=true")
    more += (f"model={{path: {base}}}", f"tokenizer={{path: {base}}}")
    world = 1 if strategy == "single" else 2
    compare_bytes(strategy, world, path, workspace, 0.05, *more, name=f"{kind}_{precision}")


def compare_bytes(
    strategy: str, world: int, path: Path, workspace: Workspace, limit: float = 0.05, *more: str, name: str = ""
) -> None:
    changed = [name] if name else [each.partition("=")[0] for each in more]
    output_dir = workspace.folder / "_".join(["bytes", path.parent.name, path.stem, *changed])
    program = str(Path(__file__).with_name("tensor_bytes_probe.py"))
    command = launch_command("fork", path, world, workspace.folder, program)
    config = [] if name else [f"model.config={json.dumps(CONFIG)}"]
    arguments = [f"output_dir={output_dir}", *SETTINGS, *config, *more, "--strategy", str(path)]
    run = workspace.execute([*command, str(workspace.recipe), *arguments], output_dir)
    assert run.returncode == 0, run.output
    assert (run.facts["strategy"], run.facts["world_size"]) == (path.stem, world)
    found = [json.loads(line.split("BYTES ", 1)[1]) for line in run.output.splitlines() if "BYTES " in line]
    assert len(found) == 5
    job = replace(from_json(run.facts["predicted"]["job"]), calibration=None, memory_kind="torch_allocated")
    predicted = memory.anatomy(job)[0]
    assert predicted.stage.index == 0
    lines = [each for each in predicted.lines if each.name != "workspaces"]  # of cuBLAS
    peak = max(sum(getattr(line, moment) for line in lines) for moment in MOMENTS)
    # the least of five steps: a thread of gloo may let go of a buffer later, and out of the profiler's sight
    measured = min(each["peak"] for each in found)
    error = peak / measured - 1
    print(f"{path.stem}: {measured:,} bytes of tensors, predicted {error:+.1%}")
    assert abs(error) < limit, [each for each in lines if each.backward or each.forward]
