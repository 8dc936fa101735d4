"""ms-swift: `swift sft`, `swift pt` and `swift rlhf`."""

from __future__ import annotations

import math
from typing import Any

from samecurve.config.trainers import arguments, trl
from samecurve.config.trainers.translation import NoEffect, NoEqual, Rule, Settings, Trainer
from samecurve.errors import ConfigurationError

METHODS = {"sft": "sft", "pt": "continue_pretrain", "rlhf": "dpo"}
PREFERENCES = {"dpo": "sigmoid", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
HEADS = {"causal_lm": "sft", "seq_cls": "classify", "embedding": "embed"}


def task(settings: Settings) -> str:
    kind = settings.get("rlhf_type", "dpo") if settings.get("method") == "rlhf" else None
    if kind == "rm":
        return "reward"
    if kind == "gkd":
        if arguments.number(settings.get("lmbda", 0.5)) == 0:
            return "distill"
        raise ConfigurationError(
            "rlhf_type: found gkd on answers of the student; lmbda 0, on those of the data, is built"
        )
    if kind and kind not in PREFERENCES:
        known = ", ".join(PREFERENCES)
        raise ConfigurationError(f"rlhf_type: found {kind}, which has no task here; {known} and rm have one")
    head = str(settings.get("task_type", "causal_lm"))
    if head not in HEADS:
        raise ConfigurationError(f"task_type: found {head}, which has no task here; {', '.join(HEADS)} have one")
    tuner = settings.get("tuner_type", settings.get("train_type", "lora"))
    if tuner not in ("lora", "full"):
        raise ConfigurationError(f"tuner_type: found {tuner}, which is not built here; lora and full are")
    method = settings.get("method", "sft")
    if method not in METHODS:
        raise ConfigurationError(f"swift {method} has no task here; {', '.join(METHODS)} have one")
    return METHODS[method] if head == "causal_lm" else HEADS[head]


def lora(settings: Settings) -> bool:
    return settings.get("tuner_type", settings.get("train_type", "lora")) == "lora"


def defaults(settings: Settings) -> dict[str, Any]:
    rows, processes = settings.get("per_device_train_batch_size", 1), settings.get("num_processes", 1)
    given = {"per_device_train_batch_size": 1, "num_train_epochs": 3, "lr_scheduler_type": "cosine", "seed": 42}
    given |= {"learning_rate": 1e-4 if lora(settings) else 1e-5, "warmup_ratio": 0.05, "adam_beta2": 0.95}
    given |= {"gradient_accumulation_steps": math.ceil(16 / (int(rows) * int(processes))), "weight_decay": 0.1}
    # as the configs of nearly all models of today have it, which it reads
    given |= {} if {"bf16", "fp16"} & settings.keys() else {"torch_dtype": "bfloat16"}
    given |= {"max_length": "the model's longest"}
    given |= {"truncation_strategy": "delete"} if task(settings) in ("sft", "dpo", "distill") else {}
    if settings.get("rlhf_type") == "simpo":
        given |= {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 1.0}
    given |= {"gradient_checkpointing": True, "save_steps": 500, "logging_steps": 5}
    given |= {"packing": False} if task(settings) in ("sft", "continue_pretrain") else {}
    given |= {"loss_scale": "default"} if task(settings) == "sft" else {}
    adapted = {
        "tuner_type": "lora",
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": "all-linear",
    }
    if "train_type" in settings:  # the name of tuner_type before version 4
        del adapted["tuner_type"]
    return given | (adapted if lora(settings) else {})


def adapter(key: str, kind: Any) -> Any:
    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
        return {key: kind(value)} if lora(settings) else NoEffect("without tuner_type lora")

    return rule


def data_sets(value: Any, settings: Settings) -> dict[str, Any]:
    """`name:subset#count`; the count is read from data.path, too."""
    sources = []
    for word in value if isinstance(value, list) else [value]:
        path, mark, count = str(word).removeprefix("HF::").removeprefix("hf::").partition("#")
        name, _, subset = path.partition(":")
        given = {"path": f"{name}{mark}{count}"} | ({"config": subset} if subset not in ("", "default") else {})
        sources.append(given | {"weight": 1.0})
    if len(sources) > 1:
        return {"data.mixture": sources}
    return {f"data.{key}": sources[0][key] for key in ("path", "config") if key in sources[0]}


def held_out_path(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    words = value if isinstance(value, list) else [value]
    return {"evaluate.path": str(words[0])} if len(words) == 1 else NoEqual("evaluate.path: one data set")


def evaluation(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    """It evaluates as often as it saves, unless nothing is held out."""
    if not (arguments.number(settings.get("split_dataset_ratio") or 0) or settings.get("val_dataset")):
        return NoEffect("no rows are held out")
    return arguments.every("evaluation", "steps", "eval")(value, settings)


def trained(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    known = {"default": "assistant", "all": "all"}
    return {"data.train_on": known[value]} if value in known else NoEqual("data.token_weights, of a turn or of tokens")


def dtype(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return {"precision": names[value]} if value in names else NoEqual("precision: fp32, bf16, fp16")


PROBLEMS = {"single_label_classification": "single_label", "multi_label_classification": "multi_label"}
PROBLEMS |= {"regression": "regression"}
RULES: dict[str, Rule] = arguments.RULES | {
    "method": NoEffect("the task"),
    "rlhf_type": lambda value, _: {"dpo.loss": PREFERENCES[value]} if value in PREFERENCES else NoEffect("the task"),
    "task_type": NoEffect("the task"),
    "num_labels": NoEffect("follows from the data"),
    "problem_type": lambda value, _: (
        {"classify.problem_type": PROBLEMS[value]} if value in PROBLEMS else NoEqual("classify")
    ),
    "model": "model.path",
    "model_id_or_path": "model.path",
    "model_revision": "model.revision",
    "dataset": data_sets,
    "val_dataset": held_out_path,
    "split_dataset_ratio": lambda value, _: (
        {"data.validation_fraction": arguments.number(value)} if arguments.number(value) else NoEffect("off")
    ),
    "eval_steps": evaluation,
    "eval_strategy": evaluation,
    "max_length": lambda value, _: (
        {"batch.sequence_length": int(value)}
        if str(value).isdecimal()
        else NoEqual("batch.sequence_length, 1024 where nothing is said")
    ),
    "truncation_strategy": lambda value, _: (
        {"data.truncation": {"delete": "drop", "left": "left", "right": "right", "raise": "error"}[value]}
        if value in ("delete", "left", "right", "raise")
        else NoEqual("data.truncation: right, left, drop, error")
    ),
    "packing": lambda value, _: {"data.packing": arguments.flag(value)},
    "padding_free": NoEffect("data.packing and data.group_by_length save padding"),
    "loss_scale": trained,
    "system": NoEqual("a system message in the rows"),
    "template": NoEffect("the tokenizer's own chat template; `samecurve inspect` shows the tokens"),
    "agent_template": NoEqual("the tokenizer's own chat template, which renders tools"),
    "use_chat_template": lambda value, _: {} if arguments.flag(value) else {"data.chat": False},
    "enable_thinking": lambda value, _: {"data.chat_template_kwargs": {"enable_thinking": arguments.flag(value)}},
    "add_non_thinking_prefix": NoEffect("as the chat template writes it"),
    "tuner_type": lambda value, _: {"adapter.name": "lora"} if value == "lora" else {},
    "train_type": lambda value, _: {"adapter.name": "lora"} if value == "lora" else {},
    "lora_rank": adapter("adapter.rank", int),
    "lora_alpha": adapter("adapter.alpha", int),
    "lora_dropout": adapter("adapter.dropout", float),
    "target_modules": adapter(
        "adapter.target_modules", lambda value: value if value == "all-linear" else arguments.comma_list(value)
    ),
    "target_parameters": adapter("adapter.target_parameters", arguments.comma_list),
    "modules_to_save": adapter("adapter.modules_to_save", arguments.comma_list),
    "adapters": adapter("adapter.path", str),
    "use_rslora": adapter("adapter.rslora", arguments.flag),
    "use_dora": adapter("adapter.dora", arguments.flag),
    "lorap_lr_ratio": adapter("adapter.loraplus_lr_ratio", float),
    "quant_bits": lambda value, _: {"adapter.quantization": f"{value}bit"},
    "quant_method": lambda value, _: NoEffect("always") if value == "bnb" else NoEqual("bnb"),
    "bnb_4bit_quant_type": lambda value, _: NoEffect("always") if value == "nf4" else NoEqual("NF4"),
    "bnb_4bit_compute_dtype": NoEffect("`precision`"),
    "bnb_4bit_use_double_quant": NoEqual("adapter.quantization: 4bit"),
    "torch_dtype": dtype,
    "attn_impl": arguments.ATTENTION,
    "use_liger_kernel": arguments.if_on({"model.kernels": "liger", "loss.implementation": "liger"}),
    "beta": lambda value, _: {"dpo.beta": arguments.number(value)},
    "loss_type": lambda value, settings: (
        trl.loss(value, settings) if task(settings) == "dpo" else NoEqual("the usual loss of the task")
    ),
    "simpo_gamma": lambda value, settings: (
        {"dpo.gamma": arguments.number(value)} if settings.get("rlhf_type") == "simpo" else NoEffect("of simpo")
    ),
    "cpo_alpha": trl.likelihood,
    "desirable_weight": "dpo.desirable_weight",
    "undesirable_weight": "dpo.undesirable_weight",
    "rpo_alpha": NoEqual("dpo.loss: orpo, which has the answer's likelihood in it"),
    "teacher_model": "distill.teacher",
    "temperature": lambda value, settings: (
        {"distill.temperature": arguments.number(value)}
        if task(settings) == "distill"
        else NoEqual("embed.temperature")
    ),
    "lmbda": NoEffect("the task"),
    "streaming": arguments.if_on({"data.streaming": True}),
    "early_stop_interval": "evaluate.patience",
    "router_aux_loss_coef": NoEqual("model.router_loss, and the config's router_aux_loss_coef by model.overrides"),
    "sequence_parallel_size": NoEqual("a strategy with context parallelism, such as configs/fsdp_ulysses.yaml"),
    "merge_lora": NoEqual("`samecurve merge`, behind the run"),
    "init_weights": lambda value, _: NoEffect("peft's own") if arguments.flag(value) else NoEqual("peft's usual start"),
    "stop_words": NoEffect("read by inference alone"),
}
for _keys, _effect in {
    "model_author model_name check_model add_version eval_use_evalscope eval_dataset eval_dataset_args eval_limit "
    "create_checkpoint_symlink log_completions": arguments.SHOWN,
    "load_from_cache_file lazy_tokenize use_hf cached_dataset cached_val_dataset to_cached_dataset strict "
    "dataset_shuffle model_type experts_impl use_logits_to_keep top_p top_k save_safetensors device_map ddp_backend "
    "packing_cache dataloader_pin_memory local_repo_path": arguments.MACHINE,
    "freeze_vit freeze_aligner vit_gradient_checkpointing max_pixels vit_lr aligner_lr": NoEffect(
        "texts alone are trained, and towers stay frozen"
    ),
}.items():
    RULES |= dict.fromkeys(_keys.split(), _effect)
TRAINER = Trainer("ms-swift", RULES, defaults, task)
