"""The first hour of people who come from other trainers: their rows and their strategy file as they are.

Rows and files have the shapes of the examples that those trainers ship, in words of our own. What is trained is read
from `inspect`, between its brackets; the curve is compared with that of one process, whose command line says what the
strategy file says.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from harness import LLAMA, ROOT, free_port, largest_relative_difference, long
from test_equal_curves import LOSS
from test_public_strategies import CONFIG, CPU
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from samecurve.cli import commands

STEPS, ROWS = 4, 120
CITIES = ("Oslo", "Lima", "Cairo", "Perth", "Quito", "Hanoi", "Turin")
CHATML = "tokenizer.chat_template=chatml"
# of the chat models' tokenizer: no marks for what is trained, as nearly all have it
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
AUTOS = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
LOSS_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
HALF = {"fp16": {"enabled": "auto", **LOSS_SCALE, "min_loss_scale": 1}, "bf16": {"enabled": "auto"}}
STAGE_3 = {
    "stage": 3,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
ACCELERATE = {key: value for key, value in CONFIG.items() if key != "gpu_ids"} | {"distributed_type": "DEEPSPEED"}
NO_OFFLOAD = {"offload_optimizer_device": "none", "offload_param_device": "none"}
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def turn(role: str, text: str, trained: bool = False) -> str:
    """ChatML, with the brackets of `inspect`."""
    said = f"{text}<|im_end|>"
    return f"<|im_start|>{role}\n" + (f"⟦{said}⟧" if trained else said) + "\n"


def alpaca(city: str, number: int) -> tuple[dict, list[str]]:
    """LLaMA-Factory's alpaca_en_demo.json: every second row has an input."""
    given = f"{number} mm of rain" if number % 2 else ""
    row = {"instruction": f"Write about {city}.", "input": given, "output": f"{city} is a city of {number} streets."}
    question = row["instruction"] + ("\n" + given if given else "")
    return row, [turn("user", question) + turn("assistant", row["output"], True)]


def tool_calls(city: str, number: int) -> tuple[dict, list[str]]:
    """LLaMA-Factory's glaive_toolcall_en_demo.json: tools and calls are text."""
    call = {"name": "get_weather", "arguments": {"city": city}}
    result, answer = json.dumps({"degrees": number}), f"It has {number} degrees in {city}."
    turns = [("human", f"How warm is it in {city}?"), ("function_call", json.dumps(call)), ("observation", result)]
    said = [{"from": role, "value": text} for role, text in [*turns, ("gpt", answer)]]
    tools = f"Functions that can be called:\n<tools>\n{json.dumps({'type': 'function', 'function': TOOL})}\n</tools>\n"
    system = tools + 'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    texts = [turn("system", system), turn("user", turns[0][1])]
    texts += [turn("assistant", f"<tool_call>\n{json.dumps(call)}\n</tool_call>", True), turn("tool", result)]
    return {"conversations": said, "tools": json.dumps([TOOL])}, ["".join(texts) + turn("assistant", answer, True)]


def turns_with_train(city: str, number: int) -> tuple[dict, list[str]]:
    """The example of axolotl's page on conversations: which turns are trained is said by each turn."""
    said = [
        ("system", f"You know {city}.", False),
        ("human", f"How many streets has {city}?", False),
        ("gpt", "None.", False),
        ("human", "Count again.", False),
        ("gpt", f"{city} has {number} streets.", True),
    ]
    roles = {"human": "user", "gpt": "assistant"}
    row = {"conversations": [{"from": role, "value": text, "train": trained} for role, text, trained in said]}
    return row, ["".join(turn(roles.get(role, role), text, trained) for role, text, trained in said)]


def pairs(city: str, number: int) -> tuple[dict, list[str]]:
    """TRL's ultrafeedback_binarized: the prompt is the turns that both lists begin with."""
    question = f"Tell me of {city}, part {number}."  # the rows of one prompt would be held out together
    answers = f"{city} has {number} parks and a harbour.", f"No idea, {number} times."
    row = {
        name: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for name, answer in zip(("chosen", "rejected"), answers, strict=True)
    }
    return row, [turn("user", question) + turn("assistant", answer, True) for answer in answers]


def messages(city: str, number: int) -> tuple[dict, list[str]]:
    """alignment-handbook's zephyr: ultrachat_200k, whose rows have their first prompt twice."""
    said = [("user", f"Where is {city}?"), ("assistant", f"{number} km from here."), ("user", "Thanks!")]
    said += [("assistant", f"Enjoy {city}.")]
    row = {
        "prompt": said[0][1],
        "prompt_id": f"{number:064x}",
        "messages": [{"content": text, "role": role} for role, text in said],
    }
    return row, ["".join(turn(role, text, role == "assistant") for role, text in said)]


@dataclass(frozen=True)
class Story:
    """rows: makes one row from a city and a number, and what `inspect` shows of it."""

    rows: Callable[[str, int], tuple[dict, list[str]]]
    file: str
    strategy: dict
    engine: dict
    recipe: str = "sft"
    changed: str | None = None  # at most one line
    taken: dict = field(default_factory=dict)  # from the strategy's file
    no_effect: tuple[str, ...] = ()


STORIES = {
    "LLaMA-Factory's alpaca": Story(
        alpaca,
        "ds_z3_config.json",
        {
            **AUTOS,
            **HALF,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                **STAGE_3,
                "overlap_comm": False,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        {"engine": "DeepSpeedEngine", "zero_stage": 3},
        changed=CHATML,
        no_effect=(
            "zero_allow_untested_optimizer",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ),
    "LLaMA-Factory's tools": Story(
        tool_calls,
        "ds_z2_config.json",
        {
            **AUTOS,
            **HALF,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
                "round_robin_gradients": True,
            },
        },
        {"engine": "DeepSpeedEngine", "zero_stage": 2},
        changed=CHATML,
        no_effect=("zero_allow_untested_optimizer",),
    ),
    "axolotl's chat_template": Story(
        turns_with_train,
        "zero2.json",
        {
            **AUTOS,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "bf16": {"enabled": "auto"},
            "fp16": {
                "enabled": "auto",
                "auto_cast": False,
                **LOSS_SCALE,
                "initial_scale_power": 32,
                "min_loss_scale": 1,
            },
            "wall_clock_breakdown": False,
        },
        {"engine": "DeepSpeedEngine", "zero_stage": 2, "offload": ["optimizer:cpu"]},
        no_effect=("wall_clock_breakdown",),
    ),
    "TRL's DPO": Story(
        pairs,
        "deepspeed_zero2.yaml",
        {
            **ACCELERATE,
            "deepspeed_config": {
                "gradient_accumulation_steps": 1,
                **NO_OFFLOAD,
                "zero3_init_flag": False,
                "zero_stage": 2,
            },
        },
        {"engine": "DeepSpeedEngine", "zero_stage": 2},
        recipe="dpo",
        taken={"precision": "bf16", "batch.micro_batch_size": 4},
        no_effect=("deepspeed_config.zero3_init_flag",),
    ),
    "transformers' ds_config_zero3": Story(
        messages,
        "ds_config_zero3.json",
        {
            **AUTOS,
            **HALF,
            "optimizer": {
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
            },
            "zero_optimization": {
                **STAGE_3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "overlap_comm": True,
                "sub_group_size": 1e14,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {"engine": "DeepSpeedEngine", "zero_stage": 3, "offload": ["optimizer:cpu", "param:cpu"]},
        no_effect=(
            "steps_per_print",
            "wall_clock_breakdown",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
    ),
    "alignment-handbook's zephyr": Story(
        messages,
        "fsdp.yaml",
        {
            **ACCELERATE,
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_forward_prefetch": False,
                "fsdp_offload_params": False,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_sync_module_states": True,
                "fsdp_use_orig_params": True,
            },
        },
        {"engine": "FSDPLlamaForCausalLM"},
        taken={"precision": "bf16"},
        no_effect=(
            "fsdp_config.fsdp_backward_prefetch",
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "fsdp_config.fsdp_state_dict_type",
            "fsdp_config.fsdp_sync_module_states",
            "fsdp_config.fsdp_use_orig_params",
        ),
    ),
}


@pytest.fixture(scope="module")
def model_paths(workspace) -> dict[bool, Path]:
    """A model from scratch as transformers writes it, by whether it has a chat template. Every byte is a token."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", vocab_size=320, **fields)
    torch.manual_seed(1)
    model, paths = AutoModelForCausalLM.from_config(config), {}
    for is_chat in (False, True):
        paths[is_chat] = workspace.folder / f"first_hour_{'chat' if is_chat else 'base'}"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[2 if is_chat else 0])
        tokenizer.chat_template = TEMPLATE if is_chat else None
        model.save_pretrained(paths[is_chat])
        tokenizer.save_pretrained(paths[is_chat])
    return paths


def started(workspace, name: str, directory: Path, world: int, *arguments: str):
    command = ["fork", str(world), str(free_port()), "train.py", *arguments, f"output_dir={directory}"]
    run = workspace.execute(command, directory)
    assert run.returncode == 0, f"{name}: {run.output}"
    return run


EVERY_DAY = ("LLaMA-Factory's alpaca",)


@pytest.mark.parametrize("name", [*EVERY_DAY, *long(*(name for name in STORIES if name not in EVERY_DAY))])
def test_the_first_hour_of(name, workspace, model_paths, tmp_path, capsys):
    story = STORIES[name]
    rows, expected = zip(*(story.rows(CITIES[i % len(CITIES)], i) for i in range(ROWS)), strict=True)
    (tmp_path / "data.json").write_text(json.dumps(rows))
    (tmp_path / story.file).write_text(json.dumps(story.strategy))  # JSON is YAML

    recipe = f"recipes/{story.recipe}.yaml"
    common = [f"model.path={model_paths[story.changed != CHATML]}", f"data.path={tmp_path / 'data.json'}"]
    common += [story.changed] if story.changed else []
    short = [f"steps={STEPS}", "batch.sequence_length=768", f"data.cache_dir={tmp_path / 'cache'}", "export.verify=off"]

    assert commands.main(["inspect", str(ROOT / recipe), *common, *short, "--samples", str(2 * ROWS)]) == 0
    shown = re.findall(r"^sample \d+: .*\n([^ ](?:.*\n)+?)\n", capsys.readouterr().out, re.MULTILINE)
    known = {text for texts in expected for text in texts}
    assert len(shown) > 0.9 * len(known) and [text for text in shown if text not in known] == []

    arguments = [recipe, *common, *short]
    run = started(workspace, name, tmp_path / "two", 2, *arguments, "--strategy", str(tmp_path / story.file))
    same = [f"{key}={value}" for key, value in story.taken.items()]
    alone = started(workspace, name, tmp_path / "one", 0, *arguments, *same)
    facts = run.facts
    assert facts["world_size"] == 2 and {key: facts[key] for key in story.engine} == story.engine
    assert facts["precision"] == alone.facts["precision"] == story.taken.get("precision", "fp32")
    assert set(facts["from_strategy"]) == set(story.taken)
    assert set(facts["no_effect"]) == set(story.no_effect)
    assert largest_relative_difference(run.column("loss"), alone.column("loss")) < LOSS[facts["precision"]]


@pytest.mark.full
def test_three_epochs_of_300_chats(workspace, model_paths, tmp_path, capsys):
    """The command of README.md; only the model, the data and the folder are others."""
    page = (ROOT / "README.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^python (train\.py recipes/sft\.yaml .* epochs=3 .*)$", page, re.MULTILINE)
    data, directory = tmp_path / "chats.jsonl", tmp_path / "three"
    replaced = {"model.path": model_paths[True], "data.path": data, "output_dir": directory}
    script, recipe, *given = shlex.split(line)
    assert set(replaced) < {override.partition("=")[0] for override in given} and script == "train.py"
    rows = [messages(CITIES[i % len(CITIES)], i)[0]["messages"] for i in range(300)]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    arguments = [recipe, *given, *(f"{key}={value}" for key, value in replaced.items())]
    run = started(workspace, "README.md", directory, 0, *arguments, f"data.cache_dir={tmp_path / 'cache'}")

    evaluated = {record["step"]: record["eval_loss"] for record in run.metrics if "eval_loss" in record}
    steps_per_epoch = run.facts["data"]["train"]["rows"] / run.facts["recipe"]["batch"]["global_batch_size"]
    last, every = math.ceil(3 * steps_per_epoch), round(steps_per_epoch)
    assert len(run.metrics) == run.status["step"] == last
    assert list(evaluated) == [*range(every, last, every), last]
    best = min(evaluated, key=lambda step: evaluated[step])
    assert json.loads((run.directory / "checkpoints" / "best.json").read_text())["checkpoint"] == f"step_{best:08d}"
    assert f"| optimizer steps | {best} of" in (run.directory / "model" / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(run.directory / "model")
    assert commands.main(["report", str(run.directory)]) == 0 and (run.directory / "report.html").exists()
