"""Every strategy x accumulation x world follows the trajectory of one process in fp32.

Rows differ in length and their padding is masked, so a loss that is a mean of means fails. Each case asserts the
engine that ran, because on a CPU a strategy can silently become another one.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from harness import ROOT, STEPS, Run, largest_relative_difference, relative_l2

from samecurve.strategy.parallel_dims import DIMENSIONS
from samecurve.strategy.timetables import micro_batch_rule

ENGINES = {
    "single": "LlamaForCausalLM",
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDPLlamaForCausalLM",
    "hsdp": "FSDPLlamaForCausalLM",
    "tp": "LlamaForCausalLM",
    "fsdp_tp": "FSDPLlamaForCausalLM",
    "fsdp_ulysses": "FSDPLlamaForCausalLM",
    "fsdp_cp": "FSDPLlamaForCausalLM",
    "fsdp_tp_cp": "FSDPLlamaForCausalLM",
    "pipeline": "PipelineEngine",
    "pipeline_gpipe": "ScheduleGPipe",
    "pipeline_1f1b": "Schedule1F1B",
    "pipeline_interleaved": "ScheduleInterleaved1F1B",
    "pipeline_zbv": "ScheduleZBVZeroBubble",
    "pipeline_dualpipev": "ScheduleDualPipeV",
    "pipeline_fsdp": "Schedule1F1B",
    "pp_fsdp_tp": "Schedule1F1B",
}
STAGES = {"zero1": 1, "zero2": 2, "zero2_offload": 2, "zero3": 3, "zero3_offload": 3, "zero3_nvme": 3, "zero3_hpz": 3}
ENGINES |= dict.fromkeys(STAGES, "DeepSpeedEngine")
STAGES["pipeline"] = 1
OFFLOAD = {
    "zero2_offload": ["optimizer:cpu"],
    "zero3_offload": ["optimizer:cpu", "param:cpu"],
    "zero3_nvme": ["optimizer:nvme", "param:nvme"],
}
CONTEXT = {"fsdp_ulysses": "ulysses", "fsdp_cp": "allgather"}
CUT_ROWS = {**CONTEXT, "fsdp_tp_cp": "allgather"}
SCHEDULES = tuple(name for name in ENGINES if name.startswith(("pipeline_", "pp_")))
SHARDED = ("fsdp", "fsdp_tp", *CONTEXT, "hsdp", "pipeline_fsdp", "zero3", "zero3_offload", "zero3_nvme")
SHARDED += ("zero3_hpz", "pp_fsdp_tp", "fsdp_tp_cp")
# DeepSpeed's operators for offload take minutes to compile, and hsdp needs four processes; of the schedules
# test_pipeline_schedules.py runs one every day
SELDOM = (*OFFLOAD, "hsdp", "zero3_hpz", "fsdp_tp_cp", *SCHEDULES)
ONLY_ON_A_DEVICE = {"fsdp_offload"}  # FSDP2 offloads through pinned memory
ONLY_EXPERTS = {"fsdp_ep", "fsdp_ep_tp"}  # test_expert_parallel.py has models with experts
# Rounding: bf16 keeps 8 bits, so one matmul output is off by up to 2^-9 = 0.2 %; a loss near 5 averages hundreds of
# tokens, a gradient norm does not average. Strategies round at different places (DeepSpeed keeps bf16 weights, FSDP
# and DDP cast them per layer, tensor parallelism autocasts per operator), so bf16 runs are compared with the fp32
# trajectory itself.
LOSS, NORM, WEIGHTS = {"fp32": 1e-5, "bf16": 5e-3}, {"fp32": 1e-4, "bf16": 5e-2}, {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Case:
    strategy: str
    world: int
    accumulation: int
    precision: str = "fp32"

    @property
    def stages(self) -> int:
        return min(2, self.world) if self.strategy == "pipeline" or self.strategy in SCHEDULES else 1

    @property
    def cut(self) -> int:
        """Ranks of a tensor-parallel group."""
        return 2 if "tp" in self.strategy.split("_") else 1

    @property
    def parts(self) -> int:
        """Ranks over which a row's sequence is cut."""
        return 2 if self.strategy in CUT_ROWS else 1

    @property
    def readers(self) -> int:
        """Ranks that read different rows."""
        return self.world // (self.stages * self.cut * self.parts)

    @property
    def micro_batch(self) -> str:
        """The override that makes this accumulation of the recipe's 8 rows."""
        return f"batch.micro_batch_size={8 // self.readers // self.accumulation}"

    def __str__(self) -> str:
        return f"{self.strategy}-world{self.world}-accumulation{self.accumulation}-{self.precision}"


def worlds(strategy: str) -> list[int]:
    """The last one is run every day."""
    given = {"single": [1], "hsdp": [4], "tp": [2], "fsdp_tp": [2, 4], "pipeline": [1, 4, 2]}
    given |= (
        dict.fromkeys(CONTEXT, [4, 2])
        | dict.fromkeys(SCHEDULES, [2])
        | {"pipeline_fsdp": [4], "zero3_hpz": [4], "pp_fsdp_tp": [8], "fsdp_tp_cp": [8, 4]}
    )
    return given.get(strategy, [1, 2])


def accumulations(strategy: str) -> tuple[int, ...]:
    """1F1B takes at least as many micro-batches as stages, DualPipeV has two stages on each rank."""
    given = {"pipeline_dualpipev": (4, 8)}
    given |= dict.fromkeys(("pipeline_gpipe", "pipeline_interleaved", "pipeline_zbv"), (1, 2, 4))
    found = given.get(strategy, (2, 4) if strategy in SCHEDULES else (1, 2))
    if strategy in SCHEDULES:  # one micro-batch where the schedule takes it
        name = yaml.safe_load((ROOT / "configs" / f"{strategy}.yaml").read_text())["parallelism_config"]
        rule = micro_batch_rule(name["parallelism_config_pp_schedule"], 1, 2)
        assert (1 in found) == (not rule), (strategy, rule)
    return found


def cases() -> list:
    fp32 = [Case(name, world, count) for name in ENGINES for world in worlds(name) for count in accumulations(name)]
    bf16 = [Case(name, worlds(name)[-1], accumulations(name)[-1], "bf16") for name in ENGINES]
    # every day: each strategy but SELDOM on its last world with accumulation, where most can go wrong; in bf16 one of
    # each kind of optimizer
    often = [case for case in fp32 if case.world == worlds(case.strategy)[-1] and case.accumulation == 2]
    often = [case for case in often if case.strategy not in SELDOM]
    often += [case for case in bf16 if case.strategy in ("fsdp", "zero1")]
    return [pytest.param(case, marks=() if case in often else pytest.mark.full, id=str(case)) for case in fp32 + bf16]


def test_every_strategy_file_is_covered():
    files = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert files == ENGINES.keys() | ONLY_ON_A_DEVICE | ONLY_EXPERTS


@pytest.mark.parametrize("case", cases())
def test_follows_the_reference(case: Case, workspace, reference):
    if case.strategy == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    assert_follows(run_case(workspace, case), case, reference)


def test_offload_without_a_compiled_optimizer(workspace, reference):
    """zero_force_ds_cpu_optimizer: false keeps torch's AdamW."""
    case = Case("zero3_offload", 2, 2)
    path = workspace.strategy(case.strategy, zero_force_ds_cpu_optimizer=False)
    assert_follows(workspace.run(path, case.world, case.micro_batch), case, reference)


def assert_follows(run: Run, case: Case, reference: Run) -> None:
    assert run.returncode == 0, run.output
    assert_what_ran(run, case)
    assert run.column("step") == list(range(1, STEPS + 1))
    assert run.column("tokens") == reference.column("tokens")
    assert run.column("learning_rate") == reference.column("learning_rate")
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < LOSS[case.precision]
    assert largest_relative_difference(run.column("grad_norm"), reference.column("grad_norm")) < NORM[case.precision]
    assert relative_l2(run.weights, reference.weights) < WEIGHTS[case.precision]
    found, expected = run.metrics[-1], reference.metrics[-1]
    assert found["eval_tokens"] == expected["eval_tokens"]
    assert abs(found["eval_loss"] / expected["eval_loss"] - 1) < LOSS[case.precision]


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp", "fsdp_tp", "ring"])
def test_switches_of_a_strategy_in_bf16(name, workspace, reference):
    """Sequence parallelism, and a ring of keys; tests of their own have them in fp32."""
    path = workspace.ring if name == "ring" else workspace.sequence_parallel(name)
    world = 4 if name == "fsdp_tp" else 2
    run = workspace.run(path, world, f"batch.micro_batch_size={8 // world}", "precision=bf16")
    assert run.returncode == 0, run.output
    facts = run.facts
    assert (facts["precision"], facts["context_parallel"] == "ring") == ("bf16", name == "ring")
    assert facts["tp_sequence_parallel"] == (name != "ring")
    for key, limits in (("loss", LOSS), ("grad_norm", NORM)):
        assert largest_relative_difference(run.column(key), reference.column(key)) < limits["bf16"], key
    assert relative_l2(run.weights, reference.weights) < WEIGHTS["bf16"]


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_in_bf16_copies_of_weights_have_one_curve(strategy, world, workspace):
    """With the same micro-batches: products of other shapes round otherwise."""
    keys = "precision=bf16", "batch.micro_batch_size=2"
    alone, run = workspace.run(None, 1, *keys), workspace.run(strategy, world, *keys)
    assert alone.facts["engine"] == ENGINES["single"] and run.facts["engine"] == ENGINES[strategy]
    assert alone.facts["precision"] == run.facts["precision"] == "bf16"
    assert largest_relative_difference(run.column("loss"), alone.column("loss")) < LOSS["fp32"]
    assert largest_relative_difference(run.column("grad_norm"), alone.column("grad_norm")) < NORM["fp32"]


def run_case(workspace, case: Case) -> Run:
    overrides = [case.micro_batch, f"precision={case.precision}"]
    if case.strategy == "single":
        return workspace.run(None, 1, *overrides)
    # shipped with two stages; one is the boundary case
    alone = case.strategy == "pipeline" and case.stages == 1
    return workspace.run(one_stage(workspace) if alone else case.strategy, case.world, *overrides)


def one_stage(workspace) -> Path:
    folder = workspace.folder / "one_stage"
    folder.mkdir(exist_ok=True)
    config = json.loads((ROOT / "ds_configs" / "pipeline.json").read_text())
    config["pipeline"]["stages"] = 1
    (folder / "pipeline.json").write_text(json.dumps(config))
    return folder / "pipeline.json"


def assert_what_ran(run: Run, case: Case) -> None:
    facts = run.facts
    assert facts["engine"] == ENGINES[case.strategy]
    assert facts["strategy"] == case.strategy
    assert facts["world_size"] == case.world
    assert facts["gradient_accumulation_steps"] == case.accumulation
    assert facts["precision"] == case.precision
    assert facts["zero_stage"] == STAGES.get(case.strategy, 0)
    assert facts["secondary_partition"] == (2 if case.strategy == "zero3_hpz" else 1)
    if case.stages > 1:
        assert facts["pipeline_stages"] == case.stages
    replicas = 2 if case.strategy == "hsdp" else 1
    assert facts["replicate_size"] == replicas
    assert facts["tensor_parallel_size"] == case.cut
    assert facts["data_parallel_size"] == case.readers
    assert (facts["context_parallel_size"], facts["context_parallel"]) == (case.parts, CUT_ROWS.get(case.strategy, ""))
    assert facts["offload"] == OFFLOAD.get(case.strategy, [])
    assert facts["sharded"] == (case.strategy in SHARDED)
    mesh, named = facts["mesh"], {"pp": case.stages, "cp": case.parts, "tp": case.cut}
    assert {name: mesh.get(name, 1) for name in named} == named and mesh.get("dp_replicate", 1) >= replicas
    assert math.prod(mesh.values()) == case.world and list(mesh) == [name for name in DIMENSIONS if name in mesh]
    assert ("the last over neighbouring ranks" in run.output) == (len(mesh) > 1)
    assert facts["zero_stage"] or are_placed(facts, case)
    whole = whole_share(facts, case)
    # of what is cut, a tensor-parallel group holds one copy; norms are whole
    expected = whole * replicas * case.stages / case.world if facts["sharded"] or case.cut > 1 else whole
    assert expected <= facts["num_parameters_per_rank"] < 1.1 * expected


def are_placed(facts: dict, case: Case) -> bool:
    """Whether FSDP2 shards every weight, tensor parallelism cuts every matrix, and nothing else is a part."""
    layers = 4 // case.stages
    found = {
        name: dict(part.split(" ") for part in name.split(", ")) for name in facts["placements"] if name != "whole"
    }
    sharded, cut = (
        sum(count for name, count in facts["placements"].items() if "Shard" in found.get(name, {}).get(mesh, ""))
        for mesh in ("fsdp", "tp")
    )
    every = sum(facts["placements"].values())
    return sharded == facts["sharded"] * every and cut == (7 * layers + 1 if case.cut > 1 else 0)


def whole_share(facts: dict, case: Case) -> float:
    """Parameters of rank 0's stages, on all of its ranks together: half of the layers, and what is at their ends."""
    total, width = facts["num_parameters"], 32
    if case.stages == 1:
        return total
    embedding = 300 * width
    if case.strategy == "pipeline":  # DeepSpeed divides the layers by their parameters
        return (total - embedding - width) / 2 + embedding
    is_folded = case.strategy in ("pipeline_zbv", "pipeline_dualpipev")  # with the first and the last stage
    return (total - embedding - width) / 2 + embedding + width * is_folded


def libaio_is_installed() -> bool:
    return shutil.which("g++") is not None and Path("/usr/include/libaio.h").exists()
