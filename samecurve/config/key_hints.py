"""Hints for messages: the recipe key for a name of another framework, and files with a similar name."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path
from typing import Any

from samecurve.specs.environment import ROOT, SHIPPED

_SPREAD = "a recipe does not choose devices or sharding; pass a strategy: --strategy configs/zero3.yaml"
_ACCUMULATION = "batch.global_batch_size: accumulation follows from it, batch.micro_batch_size and the devices"
# Names of transformers' TrainingArguments, TRL, peft, axolotl and LLaMA-Factory, and what is easily guessed.
_HERE = {
    "optimizer.learning_rate": "lr peak_lr",
    "optimizer.name": "optim optimizer_type",
    "optimizer.max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    "optimizer.epsilon": "eps adam_epsilon",
    "schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup_steps": "warmup num_warmup_steps",
    "batch.micro_batch_size": "per_device_train_batch_size per_device_batch_size",
    "batch.global_batch_size": "batch_size train_batch_size total_batch_size",
    _ACCUMULATION: "gradient_accumulation_steps grad_accum accumulation_steps",
    "batch.sequence_length": "max_seq_length max_seq_len seq_length max_length max_len block_size cutoff_len",
    "epochs": "num_epochs num_train_epochs",
    "steps": "max_steps num_steps train_steps",
    "output_dir": "output output_path out_dir save_dir",
    "model.path": "model_name model_name_or_path base_model pretrained",
    "tokenizer.path": "tokenizer_name tokenizer_name_or_path",
    "data.path": "dataset datasets dataset_name dataset_path train_file train_data",
    "data.split": "dataset_split train_split dataset_train_split",
    "data.config": "dataset_config dataset_config_name subset",
    "data.revision": "dataset_revision",
    "evaluate.path": "eval_dataset eval_file validation_file",
    "evaluate.split": "eval_split test_split dataset_test_split",
    "evaluate.every_steps": "eval_steps eval_every",
    "data.validation_fraction": "val_size val_set_size validation_split test_size",
    "checkpoint.every_steps": "save_steps save_every",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.best": "metric_for_best_model",
    "export.checkpoint: best": "load_best_model_at_end",
    "evaluate.patience": "early_stopping_patience early_stopping early_stopping_steps",
    "evaluate.min_improvement": "early_stopping_threshold min_delta",
    "logging.every_steps": "logging_steps log_every log_interval",
    "precision": "bf16 fp16 fp32 dtype torch_dtype mixed_precision",
    "memory.activation_checkpointing": "gradient_checkpointing",
    "model.attention": "attn_implementation flash_attention flash_attn",
    "model.kernels: liger": "use_liger_kernel liger_kernel use_liger enable_liger_kernel liger",
    "adapter.name: lora": "lora peft use_lora use_peft",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.path": "adapter_name_or_path lora_model_dir",
    "adapter.target_modules": "lora_target_modules lora_target",
    "adapter.target_parameters": "lora_target_parameters lora_parameters",
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    "adapter.loraplus_lr_ratio": "loraplus_ratio",
    "adapter.quantization: 4bit": "load_in_4bit",
    "adapter.quantization: 8bit": "load_in_8bit",
    _SPREAD: "deepspeed fsdp deepspeed_config fsdp_config num_processes num_gpus",
}
_RENAMED = {theirs: ours for ours, names in _HERE.items() for theirs in names.split()}
_NEVER = ("help", "fresh")  # nobody is to start over by a typing error
# The key that is meant when a block is given as one value, in this order.
_MAIN_KEYS = ("path", "name", "every_steps")


def called_here(key: str) -> str:
    """The hint for a name that another framework uses; "" for other names."""
    ours = _RENAMED.get(key, "")
    if ours == _SPREAD:
        return f"; {ours}"  # advice, and no key to use
    return f"; use {ours}" if ours else ""


def block_as_value(key: str, value: Any, fields: list[str]) -> str:
    """The hint for a value given in place of a block, such as `model=runs/sft/model`. fields: the keys of the block."""
    main = next((name for name in _MAIN_KEYS if name in fields), None)
    if main is None or isinstance(value, (dict, list)) or value is None:
        return ""
    return f"; did you mean {key}.{main}={value}?"


def near_option(message: str, parser: argparse.ArgumentParser) -> str:
    """The hint for argparse's message about unknown options: the nearest option of the parser for each, if any."""
    known = [option for action in parser._actions for option in action.option_strings if action.dest not in _NEVER]
    hints = []
    for option in (word.partition("=")[0] for word in message.split() if word.startswith("--")):
        near = difflib.get_close_matches(option, known, n=1)
        hints += [called_here(option[2:]) or "".join(f"; did you mean {known}?" for known in near)]
    return "".join(hints)


def near_file(path: str) -> str:
    """The hint for a missing file: `sft`, `recipes/sft.yml` and `zero2` nearly name a file."""
    given = Path(path)
    folders = dict.fromkeys([os.path.dirname(path), *SHIPPED])
    known = [file for folder in folders for file in sorted(Path(folder).glob("*")) if file.suffix in (".yaml", ".json")]
    # by the names under which they are found, see environment.shipped_file
    known += [file.relative_to(ROOT) for folder in SHIPPED for file in sorted((ROOT / folder).glob("*.*"))]
    same = [file for file in known if file.stem == given.stem]
    # reversed: of several files of one name, the first folder's stays
    by_name = {file.stem: file for file in reversed(known)}
    near = same or [by_name[name] for name in difflib.get_close_matches(given.stem, by_name, n=1, cutoff=0.7)]
    return f"; did you mean {near[0]}?" if near else ""
