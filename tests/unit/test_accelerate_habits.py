"""What Accelerate's tools write and take by themselves: values that ask for nothing, and flags that agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_cases import ACCELERATE, TORCHRUN, Plan, launched, message
from test_public_strategies import FSDP2, SILENT, ZERO3, accelerate, fsdp, inline, resolved, zero

from samecurve.accelerator.launch_env import environment
from samecurve.cli.commands import main
from samecurve.strategy import written_defaults

ROOT = Path(__file__).resolve().parents[2]
BF16 = SILENT + "precision: bf16\n"
ALONE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}  # of accelerate launch, for one process


def with_gpu(monkeypatch, present: bool) -> None:
    monkeypatch.setattr(written_defaults, "has_accelerator", lambda: present)


def launch(folder, monkeypatch, strategy: str, *sizes: str) -> int:
    monkeypatch.chdir(ROOT)
    files = [str(folder / "r.yaml"), "--strategy", str(folder / strategy)]
    return main(["launch", *files, "--launcher", "accelerate", *sizes])


@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "MULTI_CPU"])
def test_a_file_for_cpus_runs_where_no_gpu_is(kind, tmp_path, monkeypatch):
    with_gpu(monkeypatch, False)
    content = accelerate(kind, use_cpu=True, num_processes=1 if kind == "NO" else 2, mixed_precision="no")
    plan = resolved(tmp_path, monkeypatch, "cpu.yaml", content)
    assert isinstance(plan, Plan), plan[0]
    assert "use_cpu" in plan.no_effect
    with_gpu(monkeypatch, True)
    report, code = resolved(tmp_path, monkeypatch, "cpu.yaml", content)
    assert code == 2 and "use_cpu: found true" in report and "CUDA_VISIBLE_DEVICES=" in report


def test_variables_of_a_file_for_cpus_are_its_own(tmp_path, monkeypatch):
    with_gpu(monkeypatch, False)
    content = accelerate(use_cpu=True, mixed_precision=None, fp16=True)
    environ = {**TORCHRUN, **ALONE, "ACCELERATE_MIXED_PRECISION": "fp16"}
    started = launched("--config_file", "cpu.yaml", "--num_processes", "2", "train.py")
    plan = resolved(tmp_path, monkeypatch, "cpu.yaml", content, environ=environ, ancestors=started)
    assert isinstance(plan, Plan), plan[0]
    assert plan.recipe.precision == "fp16"


def test_no_recomputation_of_accelerate_leaves_the_recipes(tmp_path, monkeypatch):
    content = fsdp(FSDP2, fsdp_activation_checkpointing=False)
    override = "memory.activation_checkpointing=selective"
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content, override)
    assert isinstance(plan, Plan), plan[0]
    assert plan.recipe.memory.activation_checkpointing == "selective"


def test_no_mixed_precision_is_what_accelerate_writes(tmp_path, monkeypatch):
    content = accelerate(mixed_precision="no")
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content, recipe=BF16)
    assert isinstance(plan, Plan), plan[0]
    assert plan.recipe.precision == "bf16" and "mixed_precision" in plan.no_effect
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content)
    assert plan.from_strategy.keys() == {"precision"} and plan.recipe.precision == "fp32"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (fsdp(FSDP2) | {"dynamo_backend": "INDUCTOR"}, "regional"),
        (inline(zero_stage=2) | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "full"),
        (inline(zero_stage=3) | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, None),
    ],
)
def test_compiling_as_the_strategy_allows(content, kind, tmp_path, monkeypatch):
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content)
    assert isinstance(plan, Plan), plan[0]
    if kind:
        assert plan.recipe.compile == kind and "compile" in plan.from_strategy
    else:
        assert plan.no_effect["dynamo_config.dynamo_backend"] == "a cannot be compiled"


def test_sizes_of_the_command_line_count_before_the_files(tmp_path, monkeypatch):
    content = accelerate(num_machines=2, num_processes=16, gpu_ids=None)
    flags = ("--num_machines", "4", "--num_processes", "32", "--machine_rank", "0", "train.py")
    environ = {**ACCELERATE, "WORLD_SIZE": "32"}
    ancestors = launched("--config_file", "a.yaml", *flags)
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content, environ=environ, ancestors=ancestors)
    assert isinstance(plan, Plan), plan[0]
    sizes = ["--nodes", "4", "--gpus_per_node", "8"]
    assert launch(tmp_path, monkeypatch, "a.yaml", *sizes) == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_json_is_no_config_file_of_accelerate(stage, tmp_path, monkeypatch, capsys):
    (tmp_path / "r.yaml").write_text(SILENT)
    (tmp_path / "z.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    sizes = ["--nodes", "1", "--gpus_per_node", "2"]
    assert launch(tmp_path, monkeypatch, "z.json", *sizes) == 2
    assert "z.json: a DeepSpeed JSON" in (said := capsys.readouterr().err) and "--launcher torchrun" in said


@pytest.mark.parametrize(
    ("name", "content", "flags", "recipe", "refused"),
    [
        ("a.yaml", accelerate(mixed_precision=None), ["--mixed_precision", "bf16"], BF16, None),
        ("a.yaml", accelerate(mixed_precision=None), ["--mixed_precision", "fp16"], BF16, "--mixed_precision"),
        ("a.yaml", accelerate(), ["--mixed_precision=bf16", "--multi_gpu"], SILENT, None),
        ("a.yaml", accelerate(), ["--use_fsdp"], SILENT, "--use_fsdp"),
        ("a.yaml", inline(), ["--use_deepspeed", "--zero_stage", "3"], SILENT, None),
        ("a.yaml", inline(), ["--zero_stage", "2"], SILENT, "--zero_stage"),
        ("a.yaml", fsdp(), ["--fsdp_offload_params", "false"], SILENT, None),
        ("a.yaml", fsdp(), ["--fsdp_offload_params", "true"], SILENT, "--fsdp_offload_params"),
    ],
)
def test_flags_that_say_the_same(name, content, flags, recipe, refused, tmp_path, monkeypatch):
    given = next((flag.partition("=")[2] or flags[1] for flag in flags if "precision" in flag), "no")
    environ = {**ACCELERATE, "ACCELERATE_MIXED_PRECISION": given}
    ancestors = launched("--config_file", name, "--num_processes", "2", *flags, "train.py")
    plan = resolved(tmp_path, monkeypatch, name, content, recipe=recipe, environ=environ, ancestors=ancestors)
    assert isinstance(plan, Plan) == (refused is None), plan
    assert refused is None or f"{refused}: given to accelerate launch" in plan[0]


def test_a_json_by_accelerates_own_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    flags = ("--use_deepspeed", "--deepspeed_config_file", "z.json", "--num_processes", "2")
    ancestors = launched(*flags, "train.py", directory=tmp_path)
    environ = {**ACCELERATE, "HF_HOME": str(tmp_path), "ACCELERATE_USE_DEEPSPEED": "true"}
    plan = resolved(tmp_path, monkeypatch, "z.json", zero(ZERO3), environ=environ, ancestors=ancestors)
    assert isinstance(plan, Plan), plan[0]
    plan = message(tmp_path, ["r.yaml"], environ, ancestors)
    assert isinstance(plan, Plan), plan[0]
    assert plan.strategy.sharding == "zero3" and str(plan.strategy.deepspeed_path) == "z.json"


def test_replicas_are_the_machines_of_the_deepspeed_launcher(tmp_path, monkeypatch):
    environ = {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_SIZE": "4", "CROSS_SIZE": "2"}
    plan = resolved(tmp_path, monkeypatch, "a.yaml", fsdp(fsdp_sharding_strategy="HYBRID_SHARD"), environ=environ)
    assert plan.strategy.dims.dp_replicate == 2


@pytest.mark.parametrize("number", [0, "0"])
def test_gpus_of_the_launcher_are_not_the_ranks(number, tmp_path, monkeypatch):
    plan = resolved(tmp_path, monkeypatch, "a.yaml", accelerate(gpu_ids=number))
    assert isinstance(plan, Plan), plan[0]
    assert environment(plan.strategy)["ACCELERATE_MIXED_PRECISION"] == "no"


def test_names_in_small_letters(tmp_path, monkeypatch):
    keys = {
        "fsdp_sharding_strategy": "full_shard",
        "fsdp_auto_wrap_policy": "transformer_based_wrap",
        "fsdp_state_dict_type": "full_state_dict",
        "fsdp_backward_prefetch": "backward_pre",
    }
    plan = resolved(tmp_path, monkeypatch, "a.yaml", fsdp(**keys))
    assert isinstance(plan, Plan), plan[0]
    assert plan.strategy.accelerate["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert plan.strategy.accelerate["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


def test_an_exchange_that_nothing_reads(tmp_path, monkeypatch):
    sizes = {"parallelism_config_cp_size": 1, "parallelism_config_cp_comm_strategy": "allgather"}
    plan = resolved(tmp_path, monkeypatch, "a.yaml", {**fsdp(FSDP2), "parallelism_config": sizes})
    assert isinstance(plan, Plan), plan[0]
    assert "parallelism_config.parallelism_config_cp_comm_strategy" in plan.no_effect
