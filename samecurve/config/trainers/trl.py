"""TRL: `trl sft --config FILE`, and the options of its scripts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from samecurve.config.trainers import arguments
from samecurve.config.trainers.translation import NoEffect, NoEqual, Rule, Settings, Trainer
from samecurve.errors import ConfigurationError

LOSSES = {"dpo": ("sigmoid", "ipo"), "orpo": (), "cpo": ("simpo",), "kto": ("kto",)}
METHODS = {"sft": "sft", **dict.fromkeys(LOSSES, "dpo"), "reward": "reward", "prm": "process_reward"}


def task(settings: Settings) -> str:
    method = settings.get("method", "sft")
    if method not in METHODS:
        raise ConfigurationError(f"trl {method} has no task here; those of {', '.join(METHODS)} have one")
    if method == "cpo" and settings.get("loss_type") != "simpo":
        raise ConfigurationError("trl cpo: its own loss is not built here; loss_type: simpo is, and trl dpo")
    is_text = method == "sft" and settings.get("dataset_text_field", "text") in (row := first_row(settings))
    return "continue_pretrain" if is_text and not {"messages", "prompt"} & row.keys() else METHODS[method]


def defaults(settings: Settings) -> dict[str, Any]:
    """Those of TRL 1.16's SFTConfig, DPOConfig and RewardConfig."""
    method = settings.get("method", "sft")
    rates = {"sft": 2e-5, "reward": 1e-4, "prm": 1e-5}
    given = arguments.DEFAULTS | {"learning_rate": rates.get(method, 1e-6), "logging_steps": 10, "max_length": 1024}
    given |= {"gradient_checkpointing": True}
    given |= {} if arguments.flag(settings.get("fp16")) or "bf16" in settings else {"bf16": True}
    given |= {"packing": False} if method == "sft" else {}
    given |= {"cpo_alpha": 1.0, "simpo_gamma": 0.5} if method == "cpo" else {}
    given |= {"train_on": None} if METHODS.get(method) in ("sft", "dpo") else {}
    # peft's own choice for most families, where no modules are named
    adapted = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    return given | (adapted if lora(settings) else {})


def lora(settings: Settings) -> bool:
    return arguments.flag(settings.get("use_peft"))


def adapter(key: str, kind: Any) -> Any:
    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
        return {"adapter.name": "lora", key: kind(value)} if lora(settings) else NoEffect("without use_peft")

    return rule


def train_on(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    if value is None and {"assistant_only_loss", "completion_only_loss"} & settings.keys():
        return NoEffect("said by another key")
    if arguments.flag(settings.get("assistant_only_loss")):
        return {"data.train_on": "assistant"}
    if settings.get("completion_only_loss") is None:  # whole conversations have no prompt that would be left out
        return {"data.train_on": "all" if "messages" in first_row(settings) else "completion"}
    return {"data.train_on": "completion" if arguments.flag(settings["completion_only_loss"]) else "all"}


def loss(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    method = settings.get("rlhf_type", settings.get("method", "sft"))  # the former in ms-swift
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if method == "sft":
        return NoEffect("the usual one") if name in ("nll", "chunked_nll") else NoEqual("the likelihood of the tokens")
    if name in LOSSES.get(method, ()):
        return {"dpo.loss": name}
    return NoEqual(f"dpo.loss: {' or '.join(LOSSES.get(method) or LOSSES['dpo'])}")


def margin(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    return {"dpo.gamma": arguments.number(value)} if settings.get("loss_type") == "simpo" else NoEffect("of simpo")


def likelihood(value: Any, settings: Settings) -> NoEffect | NoEqual:
    near = "dpo.loss: orpo, which has the answer's likelihood in it"
    return NoEqual(near) if arguments.number(value) else NoEffect("off")


def first_row(settings: Settings) -> dict[str, Any]:
    """The first row of a .jsonl that is here, {} of other data: it says what kind of rows TRL would find."""
    path = Path(str(settings.get("dataset_name") or settings.get("dataset_path")))
    row = None
    if path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8") as file, suppress(ValueError):
            row = json.loads(file.readline())
    return row if isinstance(row, dict) else {}


def data_set(value: Any, settings: Settings) -> dict[str, Any]:
    """TRL renders no chat template around a prompt and a completion that are text."""
    row = first_row(settings)
    is_text = isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)
    return {"data.path": value} | ({"data.chat": False} if is_text else {})


def longest(value: Any, settings: Settings) -> dict[str, Any]:
    """null cuts no row."""
    no_equal = NoEqual("batch.sequence_length: as many tokens as the longest row has")
    return {"max_length": no_equal} if value is None else {"batch.sequence_length": int(value)}


def dataset_split(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    return {"data.split": value} if str(value).isidentifier() else NoEqual("data.split and data.max_samples")


RULES: dict[str, Rule] = arguments.RULES | {
    "method": lambda value, _: {"dpo.loss": value} if value in ("orpo", "kto") else NoEffect("the task"),
    "dataset_name": data_set,
    "dataset_path": data_set,
    "dataset_config": "data.config",
    "dataset_train_split": dataset_split,
    "dataset_test_split": lambda value, settings: (
        {"evaluate.split": value} if str(settings.get("eval_strategy", "no")) != "no" else NoEffect("no evaluation")
    ),
    "dataset_text_field": "data.text_column",
    "dataset_streaming": arguments.if_on({"data.streaming": True}),
    "dtype": NoEffect("weights are trained in fp32; `precision` says how this run computes"),
    "torch_dtype": NoEffect("weights are trained in fp32; `precision` says how this run computes"),
    "model_revision": "model.revision",
    "max_length": longest,
    "max_seq_length": lambda value, settings: {"batch.sequence_length": int(value)},
    "max_prompt_length": NoEffect("data.truncation cuts what is longer than batch.sequence_length"),
    "max_completion_length": NoEffect("data.truncation cuts what is longer than batch.sequence_length"),
    "truncation_mode": lambda value, settings: {"data.truncation": "left" if value == "keep_end" else "right"},
    "packing": lambda value, settings: {"data.packing": arguments.flag(value)},
    "packing_strategy": NoEffect("rows are packed by best fit, and documents never attend to each other"),
    "padding_free": NoEffect("data.packing and data.group_by_length save padding"),
    "eval_packing": NoEffect("as in training"),
    "pad_to_multiple_of": NoEffect("padding is not trained on"),
    "train_on": train_on,
    "assistant_only_loss": train_on,
    "completion_only_loss": train_on,
    "chat_template_path": "tokenizer.chat_template",
    "tokenizer_name_or_path": "tokenizer.path",
    "hub_model_revision": arguments.SHOWN,
    "use_liger": arguments.RULES["use_liger_kernel"],
    "eos_token": NoEffect("the token that ends a turn is read off the chat template"),
    "pad_token": "tokenizer.pad_token",
    "beta": lambda value, settings: {"dpo.beta": arguments.number(value)},
    "loss_type": loss,
    "loss_weights": NoEqual("dpo.loss: one loss"),
    "label_smoothing": NoEffect("TRL's sigmoid loss does not use it; dpo.label_smoothing would"),
    "simpo_gamma": margin,
    "cpo_alpha": likelihood,
    "desirable_weight": "dpo.desirable_weight",
    "undesirable_weight": "dpo.undesirable_weight",
    "precompute_ref_log_probs": NoEffect("always, and cached"),
    "center_rewards_coefficient": lambda value, settings: {
        "reward.center_rewards_coefficient": arguments.number(value) or None
    },
    "step_separator": "process_reward.step_separator",
    "use_peft": lambda value, settings: {"adapter.name": "lora"} if arguments.flag(value) else NoEffect("off"),
    "lora_r": adapter("adapter.rank", int),
    "lora_alpha": adapter("adapter.alpha", int),
    "lora_dropout": adapter("adapter.dropout", float),
    "lora_target_modules": adapter(
        "adapter.target_modules", lambda value: "all-linear" if value == "all-linear" else arguments.comma_list(value)
    ),
    "lora_target_parameters": adapter("adapter.target_parameters", arguments.comma_list),
    "lora_modules_to_save": adapter("adapter.modules_to_save", arguments.comma_list),
    "lora_task_type": NoEffect("follows from the task"),
    "use_rslora": adapter("adapter.rslora", arguments.flag),
    "use_dora": adapter("adapter.dora", arguments.flag),
    "load_in_4bit": arguments.if_on({"adapter.quantization": "4bit"}),
    "load_in_8bit": arguments.if_on({"adapter.quantization": "8bit"}),
    "use_bnb_nested_quant": NoEqual("adapter.quantization: 4bit"),
    "bnb_4bit_quant_type": lambda value, settings: NoEffect("always") if value == "nf4" else NoEqual("NF4"),
    "activation_offloading": arguments.if_on({"memory.activation_checkpointing": "offload"}),
    "ignore_bias_buffers": NoEffect("buffers are not synchronized"),
    "no_remove_unused_columns": NoEffect("data.ignore_columns names what is not read"),
    "vllm_mode": NoEffect("nothing is generated while it trains"),
    "use_vllm": NoEffect("nothing is generated while it trains"),
}


TRAINER = Trainer("TRL", RULES, defaults, task, nulls=("max_length",))
