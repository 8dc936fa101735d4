"""Every strategy file, read by the libraries that it is meant for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from samecurve.strategy.accelerate_keys import OURS

ROOT = Path(__file__).parents[2]
STRATEGIES = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
DEEPSPEED = {path.stem: path for path in (ROOT / "ds_configs").glob("*.json")}
WITH_JSON = {"zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme", "zero3_hpz", "pipeline"}
SCHEDULES = {"pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_zbv", "pipeline_dualpipev"}
MULTI_GPU = {"ddp", "tp"} | SCHEDULES
MESHES = {"fsdp_tp", "fsdp_ulysses", "fsdp_cp", "fsdp_ep", "fsdp_ep_tp", "pipeline_fsdp", "pp_fsdp_tp", "fsdp_tp_cp"}
FSDP = {"fsdp", "fsdp_offload", "hsdp"} | MESHES
PROCESSES = {"single": 1, "pp_fsdp_tp": 8, "fsdp_tp_cp": 8}
PROCESSES |= dict.fromkeys(("hsdp", "fsdp_tp", "fsdp_ep_tp", "pipeline_fsdp", "zero3_hpz"), 4)
WITHOUT_JSON = {"single"} | FSDP | MULTI_GPU
OWNED_BY_THE_RECIPE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}


def test_the_folders_hold_what_the_tests_cover():
    assert set(STRATEGIES) == WITH_JSON | WITHOUT_JSON
    assert set(DEEPSPEED) == WITH_JSON


def launch_arguments(name: str):
    """What `accelerate launch --config_file` makes of the file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    command = ["--config_file", str(STRATEGIES[name]), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    return arguments


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_accelerate_reads_the_file(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(STRATEGIES[name]))
    arguments = launch_arguments(name)
    assert config.distributed_type == ({"single": "NO"} | dict.fromkeys(MULTI_GPU, "MULTI_GPU")).get(name) or (
        "DEEPSPEED" if name in WITH_JSON else "FSDP"
    )
    assert arguments.num_processes == PROCESSES.get(name, 2)
    # the recipe owns the precision; with a DeepSpeed JSON the key would raise
    assert config.mixed_precision is None and arguments.mixed_precision == "no"


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_nested_keys_are_known_and_differ_from_the_default(name):
    """Accelerate ignores unknown nested keys, so a slip of the pen would go unnoticed."""
    from accelerate.commands.launch import launch_command_parser

    defaults = vars(launch_command_parser().parse_args(["train.py"]))
    content = yaml.safe_load(STRATEGIES[name].read_text())
    nested = {key: value for block in content.values() if isinstance(block, dict) for key, value in block.items()}
    for key, value in nested.items():
        if key in OURS and key not in defaults:
            continue
        assert key in defaults
        assert str(value).lower() != str(defaults[key]).lower(), f"{key} is accelerate's default"


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_key_has_its_reason(name):
    lines = STRATEGIES[name].read_text().splitlines()
    assert lines[0].startswith("# ")
    told_by_the_first_line = ("distributed_type:", "deepspeed_config_file:")
    for line in (line for line in lines if not line.startswith("# ")):
        is_block = line.rstrip().endswith(":")
        assert is_block or "  # " in line or line.strip().startswith(told_by_the_first_line) or name == "single", line


@pytest.mark.parametrize("name", sorted(WITHOUT_JSON - MULTI_GPU - {"single"}))
def test_fsdp_files_make_the_plugin_they_promise(name):
    from accelerate.utils.launch import prepare_multi_gpu_env

    made = prepare_multi_gpu_env(launch_arguments(name))
    assert made["FSDP_VERSION"] == "2"
    assert made["FSDP_OFFLOAD_PARAMS"] == ("true" if name == "fsdp_offload" else "false")
    assert made["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    meshes = {"hsdp": "2"} | dict.fromkeys(MESHES, "1")
    assert made.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE") == meshes.get(name)


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_yaml_names_the_json_of_the_same_stem(name):
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    arguments = launch_arguments(name)
    arguments.deepspeed_fields_from_accelerate_config = ""
    _, made = prepare_deepspeed_cmd_env(arguments)
    assert made["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == f"ds_configs/{name}.json"
    # pdsh, the default, would write the whole environment into .deepspeed_env
    assert arguments.deepspeed_multinode_launcher == "standard"


def deepspeed_config(name: str, precision: str = "bf16"):
    """DeepSpeed's own reading, with the recipe's numbers written in."""
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads(DEEPSPEED[name].read_text())
    content.pop("pipeline", None)
    numbers = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    return DeepSpeedConfig(content | numbers | {key: {"enabled": key == precision} for key in ("bf16", "fp16")})


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_deepspeed_reads_the_json(name):
    config = deepspeed_config(name)
    zero = config.zero_config
    assert zero.stage == (1 if name == "pipeline" else int(name[4]))
    device = {"offload": "cpu", "nvme": "nvme"}.get(name.partition("_")[2])
    assert (zero.offload_optimizer and zero.offload_optimizer.device) == device
    assert (zero.offload_param and zero.offload_param.device) == (device if zero.stage == 3 else None)
    assert zero.zero_hpz_partition_size == (2 if name == "zero3_hpz" else 1)
    # sums of bf16 gradients would depend on the number of ranks and micro-batches
    assert str(config.communication_data_type) == "torch.float32"
    assert config.grad_accum_dtype == "fp32"


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_json_leaves_the_recipes_numbers_to_the_recipe(name):
    content = json.loads(DEEPSPEED[name].read_text())
    assert OWNED_BY_THE_RECIPE.items() <= content.items()
    assert ("pipeline" in content) == (name == "pipeline")


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_no_file_turns_on_what_may_race(name):
    """Users reported a loss of NaN or 0 with overlap_comm, which no CPU can show: docs/gpu.md, B8."""
    assert "overlap_comm" not in json.loads(DEEPSPEED[name].read_text())["zero_optimization"]
