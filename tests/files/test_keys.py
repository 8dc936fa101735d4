"""The tables of legal keys against the installed accelerate and DeepSpeed: an upgrade that moves a key fails here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from samecurve.strategy import validate
from samecurve.strategy.accelerate_keys import (
    ACCELERATE,
    ACCUMULATION,
    INLINE,
    OURS,
    NoEffect,
    RecipeOwned,
    Rejected,
    ValueRule,
)
from samecurve.strategy.deepspeed_keys import DEEPSPEED, SECOND_NAMES, STAGES, ZERO

FAMILIES = {
    "pp_": "schedule",
    "single": "single",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": "fsdp",
    "tp": "tp",
    "zero": "zero",
    "pipeline_": "schedule",
    "pipeline": "pipeline",
}
RECIPE = """\
output_dir: runs/keys
steps: 2
model: {config: {model_type: llama}}
tokenizer: {vocabulary_size: 300}
data: {path: "builtin:python-stdlib"}
batch: {global_batch_size: 8, sequence_length: 8}
optimizer: {learning_rate: 1e-3}
"""
BLOCKS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config")


def of_library(table) -> set[str]:
    """The keys that the installed library reads, too."""
    return {key for key, rule in table.items() if not (isinstance(rule, NoEffect) and rule.foreign)}


def fields(model) -> set[str]:
    """The names under which a pydantic block of DeepSpeed takes its keys from JSON."""
    return {field.alias or name for name, field in model.model_fields.items()}


def test_accelerate_top_level():
    from accelerate.commands.config.config_args import ClusterConfig

    # both are old spellings that accelerate translates before it builds the config
    assert of_library(ACCELERATE) - {"fp16", "dynamo_backend"} == set(ClusterConfig.__dataclass_fields__)


@pytest.mark.parametrize("block", BLOCKS)
def test_accelerate_block(block):
    from accelerate.commands.launch import launch_command_parser

    names = {action.dest for action in launch_command_parser()._actions}
    prefix = block.removesuffix("config")
    ours = of_library(ACCELERATE[block]) - {*OURS, "fsdp_ignored_modules"}  # read from the file, though no flag sets it
    assert ours <= names
    if block != "deepspeed_config":  # its names have no common prefix; the next test takes their help group
        assert ours == {name for name in names if name.startswith(prefix)}


def test_accelerate_deepspeed_group():
    from accelerate.commands.launch import launch_command_parser

    groups = {group.title: group for group in launch_command_parser()._action_groups}
    assert of_library(ACCELERATE["deepspeed_config"]) == {a.dest for a in groups["DeepSpeed Arguments"]._group_actions}


def deepspeed_models():
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return [
        (DeepSpeedZeroConfig, ZERO),
        (DeepSpeedZeroOffloadOptimizerConfig, ZERO["offload_optimizer"]),
        (DeepSpeedZeroOffloadParamConfig, ZERO["offload_param"]),
        (DeepSpeedZeroLeafModuleConfig, ZERO["leaf_module"]),
        (DeepSpeedBF16Config, DEEPSPEED["bf16"]),
        (DeepSpeedFP16Config, DEEPSPEED["fp16"]),
        (CommsLoggerConfig, DEEPSPEED["comms_logger"]),
        (DeepSpeedThroughputTimerConfig, DEEPSPEED["timers"]["throughput"]),
    ]


def test_deepspeed_blocks():
    from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS

    compared = 0
    for model, table in deepspeed_models():
        assert of_library(table) - set(_REMOVED_ZERO_CONFIG_KEYS) == fields(model), model.__name__
        compared += len(table)
    assert compared > 80


class Asked(dict):
    """A config that notes which keys DeepSpeed looks for: its top level has no schema to compare with."""

    def __init__(self, *args):
        super().__init__(*args)
        self.keys_asked: set[str] = set()

    def _note(self, key):
        self.keys_asked.add(key)
        return key

    def get(self, key, default=None):
        return super().get(self._note(key), default)

    def __contains__(self, key):
        return super().__contains__(self._note(key))

    def __getitem__(self, key):
        return super().__getitem__(self._note(key))

    def __copy__(self):
        return self

    def keys(self):
        return self


def test_deepspeed_top_level():
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

    config = Asked({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(config)
    asked_by_several_processes_only = {"sequence_parallel_size"}
    ours = of_library(DEEPSPEED) - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) - asked_by_several_processes_only
    assert ours == config.keys_asked - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS)


@pytest.mark.parametrize("block", ["aio", "activation_checkpointing", "flops_profiler", "data_types"])
def test_deepspeed_blocks_without_a_schema(block):
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = Asked()
    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, block: asked})
    assert set(DEEPSPEED[block]) == asked.keys_asked


def test_deepspeed_pipeline_block():
    from deepspeed.runtime.config import get_pipeline_config

    # the pipeline engine reads use_reentrant too, and has no default for it in the configuration
    assert set(DEEPSPEED["pipeline"]) == {*get_pipeline_config({}), "use_reentrant"}


ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    path.relative_to(ROOT) for pattern in ("configs/*.yaml", "ds_configs/*.json") for path in ROOT.glob(pattern)
)


def test_shipped_files_are_found():
    assert len(SHIPPED) >= 19


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_shipped_strategy_resolves(path, tmp_path, monkeypatch):
    from samecurve.strategy.resolve import resolve_plan

    monkeypatch.chdir(ROOT)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    world = {} if path.stem == "single" else {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "4"}
    world |= {"WORLD_SIZE": "2"} if path.stem == "tp" or path.stem.startswith("pipeline_") else {}
    plan = resolve_plan([str(recipe), "--strategy", str(path)], world)
    assert (plan.notes, plan.from_strategy, plan.no_effect) == ((), {}, {})  # its name tells the truth, too
    strategy = plan.strategy
    assert strategy.name == path.stem
    assert strategy.family == next(f for stem, f in FAMILIES.items() if path.stem.startswith(stem))


def test_removed_blocks_are_named():
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    for table, removed in ((DEEPSPEED, _REMOVED_TOP_LEVEL_CONFIG_KEYS), (ZERO, _REMOVED_ZERO_CONFIG_KEYS)):
        assert removed
        for key in removed:
            assert isinstance(table[key], Rejected) and "removed" in table[key].reason


def test_stages_and_inline_keys_are_known():
    assert STAGES.keys() <= ZERO.keys()
    assert set(ACCELERATE["deepspeed_config"]) >= set(INLINE) and {path[0] for path in INLINE.values()} <= set(
        DEEPSPEED
    )


def test_second_names():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    assert {name: field.alias for name, field in fields if field.alias} == SECOND_NAMES
    assert DeepSpeedZeroConfig.model_config["populate_by_name"]


def numbers(table, path=()):
    """The keys that hold numbers."""
    for key, rule in table.items():
        if isinstance(rule, dict):
            yield from numbers(rule, (*path, key))
        elif isinstance(rule, ValueRule) and any(rule.accepts(value) for value in (0.5, 5, 0)):
            yield ".".join((*path, key)), rule


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**30, 1e30, -1], ids=str)
def test_numbers_mean_something(value):
    found = [*numbers(ACCELERATE), *numbers(DEEPSPEED)]
    assert len(found) > 40
    accepted = {key for key, rule in found if validate.complaint(rule, value) is None}
    assert accepted == ({"flops_profiler.module_depth"} if value == -1 else set())  # the last level, whichever it is


def owners(table):
    for rule in table.values():
        if isinstance(rule, dict):
            yield from owners(rule)
        elif isinstance(rule, RecipeOwned):
            yield rule.by


def test_owned_keys_exist_in_the_recipe():
    from samecurve.config.schema import Recipe

    named = {*owners(ACCELERATE), *owners(DEEPSPEED)} - {ACCUMULATION}
    assert "precision" in named
    for dotted in named:
        model = Recipe
        for key in dotted.split("."):
            model = model.model_fields[key].annotation
