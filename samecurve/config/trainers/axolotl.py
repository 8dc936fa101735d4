"""axolotl: `axolotl train FILE`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samecurve.config.trainers import arguments
from samecurve.config.trainers.translation import OFF, NoEffect, NoEqual, Rule, Settings, Trainer
from samecurve.errors import ConfigurationError

PREFERENCES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
PLAIN = ("completion", "pretrain")


def task(settings: Settings) -> str:
    method = settings.get("rl")
    if method in PREFERENCES:
        return "dpo"
    if method:
        raise ConfigurationError(f"rl: found {method}, which has no task here; {', '.join(PREFERENCES)} have one")
    if settings.get("process_reward_model"):
        return "process_reward"
    if settings.get("reward_model"):
        return "reward"
    kinds = {str(entry.get("type")) for entry in settings.get("datasets") or [] if isinstance(entry, dict)}
    return "continue_pretrain" if settings.get("pretraining_dataset") or kinds and kinds <= {*PLAIN} else "sft"


def defaults(settings: Settings) -> dict[str, Any]:
    given = {"lr_scheduler": "cosine", "weight_decay": 0.0, "sample_packing": False, "train_on_inputs": False}
    given |= {"seed": 42, "adam_beta2": 0.999, "gradient_accumulation_steps": 1, "sequence_len": 512}
    # 3 % of the steps, but not more than 100 (core/builders/base.py); epochs have no number of steps yet
    steps = int(settings.get("max_steps") or 0)
    warmup = {"warmup_steps": min(int(0.03 * steps), 100)} if steps > 0 else {"warmup_ratio": 0.03}
    given |= {} if {"warmup_steps", "warmup_ratio"} & settings.keys() else warmup
    given |= {"excess_length_strategy": "drop"} if task(settings) in ("sft", "dpo") else {}
    given |= {} if "max_steps" in settings else {"num_epochs": 1.0}
    given |= {} if {"bf16", "bfloat16", "fp16", "float16"} & settings.keys() else {"fp32": True}
    if task(settings) != "sft":
        del given["train_on_inputs"]
    return given


def adapted(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    if value not in ("lora", "qlora"):
        return NoEqual("adapter.name: lora")
    return {"adapter.name": "lora"} | ({"adapter.quantization": "4bit"} if value == "qlora" else {})


def of_adapter(key: str, kind: Any) -> Any:
    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
        return (
            {key: kind(value)} if settings.get("adapter") and value not in (None, []) else NoEffect("without adapter")
        )

    return rule


def data_sets(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    entries = value if isinstance(value, list) else [value]
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
    parts = [source(entry) for entry in entries if isinstance(entry, dict)]
    unlike: dict[str, Any] = {
        f"datasets.{name}": near for entry in entries if isinstance(entry, dict) for name, near in lost(entry)
    }
    if settings.get("rl") and parts and "data.messages_column" in parts[0]:
        parts[0]["data.prompt_column"] = parts[0].pop("data.messages_column")
    # its alpaca is text without a template, which data.chat says of all data
    alpaca = [isinstance(entry, dict) and entry.get("type") == "alpaca" for entry in entries]
    if any(alpaca) and task(settings) == "sft":
        if not all(alpaca):
            return NoEqual("one run with type alpaca, text without a chat template, and one with the others")
        unlike["data.chat"] = False
        parts = [part | {"data.format": "alpaca-axolotl"} for part in parts]
    if len(parts) == 1:
        return parts[0] | unlike
    if not parts:
        return NoEqual("data.path")
    keys = {"data.path": "path", "data.split": "split", "data.config": "config", "data.pattern": "pattern"}
    keys |= {f"data.{name}_column": f"{name}_column" for name in ("text", "messages")} | {"data.format": "format"}
    mixture = [{keys[key]: part[key] for key in part if key in keys} | {"weight": 1.0} for part in parts]
    return {"data.mixture": mixture} | unlike


READ = ("path", "data_files", "split", "name", "type", "field", "field_messages", "field_chosen", "field_rejected")
# how a file is opened, and names of what is recognized by its form
OPENED = ("ds_type", "chat_template", "conversation", "roles", "field_human", "field_model", "message_field_role")
OPENED += ("message_field_content", "message_property_mappings", "trust_remote_code", "preprocess_shards")


def lost(entry: dict[str, Any]) -> Iterator[tuple[str, NoEqual]]:
    """Yield what an entry says of its rows and no recipe does."""
    _, _, part = str(entry.get("split") or "").partition("[")
    if part and not (part.startswith(":") and part[1:-1].isdecimal()):
        yield f"split {entry['split']}", NoEqual("data.max_samples, the number of the first rows")
    if isinstance(entry.get("type"), dict):
        yield "type", NoEqual("rows with a prompt and a completion")
    for name, value in entry.items():
        if name not in (*READ, *OPENED) and value not in OFF:
            yield name, NoEqual("rows that are prepared so before; data.* has no such key")


def source(entry: dict[str, Any]) -> dict[str, Any]:
    files = entry.get("data_files")
    own = files[0] if isinstance(files, list) and len(files) == 1 else files
    is_local = entry.get("path") in ("json", "csv", "parquet", "text") and isinstance(own, str)
    values: dict[str, Any] = {"data.path": own if is_local else entry.get("path")}
    values |= {"data.pattern": own} if isinstance(own, str) and not is_local else {}
    split = str(entry.get("split") or "train")
    name, _, part = split.partition("[")
    values |= {"data.split": name} if name != "train" else {}
    values |= {"data.max_samples": int(part[1:-1])} if part[1:-1].isdecimal() and part.startswith(":") else {}
    values |= {"data.config": entry["name"]} if entry.get("name") else {}
    values |= {"data.text_column": entry["field"]} if entry.get("field") else {}
    values |= {"data.messages_column": entry["field_messages"]} if entry.get("field_messages") else {}
    values |= {"data.chosen_column": entry["field_chosen"]} if entry.get("field_chosen") else {}
    values |= {"data.rejected_column": entry["field_rejected"]} if entry.get("field_rejected") else {}
    return values


def held_out(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    share = arguments.number(value or 0)
    if not share:
        return NoEffect("off")
    return (
        {"data.validation_fraction": share} if share < 1 else NoEqual("data.validation_fraction, a share of the rows")
    )


def per_epoch(room: str) -> Any:
    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
        if room == "evaluate" and not (settings.get("val_set_size") or settings.get("test_datasets")):
            return NoEffect("no rows are held out")
        if not value:
            return {f"{room}.every_steps": 0}
        # a mixture and a number of steps have no epochs
        return {f"{room}.every_epochs": round(1 / arguments.number(value), 6)}

    return rule


def steps_between(room: str) -> Any:
    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
        if room == "evaluate" and not (settings.get("val_set_size") or settings.get("test_datasets")):
            return NoEffect("no rows are held out")
        count = arguments.number(value or 0)
        return {f"{room}.every_steps": int(count)} if not 0 < count < 1 else NoEqual(f"{room}.every_epochs")

    return rule


def schedule(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    least = settings.get("cosine_min_lr_ratio")
    if value == "cosine" and settings.get("cosine_constant_lr_ratio"):
        return NoEqual("schedule.name: wsd, or cosine with schedule.min_lr_ratio")
    answer = arguments.schedule(value, settings)
    return answer | {"schedule.min_lr_ratio": arguments.number(least)} if least and isinstance(answer, dict) else answer


def tokens(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    """Only the padding token changes what is trained; the others name what the tokenizer has."""
    pad = value.get("pad_token") if isinstance(value, dict) else None
    needs = task(settings) in ("reward", "process_reward")
    return {"tokenizer.pad_token": pad} if pad and needs else NoEffect("as the tokenizer and its template say")


def recomputation(value: Any, settings: Settings) -> dict[str, Any]:
    kind = "offload" if value in ("offload", "unsloth") else "full" if arguments.flag(value) else "none"
    return {"memory.activation_checkpointing": kind}


def mixed(name: str) -> Any:
    """`bf16: auto` is bf16, or fp16 on a device without it."""
    return lambda value, _: {"precision": name} if arguments.flag(value) or value == "full" else NoEffect("off")


def liger(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    return {"model.kernels": "liger"} if arguments.flag(value) else NoEffect("off")


TEMPLATES = {"chatml": {"tokenizer.chat_template": "chatml"}}
RULES: dict[str, Rule] = arguments.RULES | {
    "base_model": "model.path",
    "revision_of_model": "model.revision",
    "datasets": data_sets,
    "pretraining_dataset": data_sets,
    "test_datasets": lambda value, _: (
        {"evaluate.path": data_sets(value, {}).get("data.path")}  # type: ignore[union-attr]
        if isinstance(value, list) and len(value) == 1
        else NoEqual("evaluate.path")
    ),
    "rl": lambda value, _: {"dpo.loss": PREFERENCES[value]} if value else NoEffect("off"),
    "rl_beta": lambda value, _: {"dpo.beta": arguments.number(value)},
    "dpo_beta": lambda value, _: {"dpo.beta": arguments.number(value)},
    "kto_desirable_weight": "dpo.desirable_weight",
    "kto_undesirable_weight": "dpo.undesirable_weight",
    "orpo_alpha": lambda value, _: {"dpo.beta": arguments.number(value)},
    "reward_model": NoEffect("the task"),
    "process_reward_model": NoEffect("the task"),
    "num_labels": NoEffect("follows from the task"),
    "center_rewards_coefficient": "reward.center_rewards_coefficient",
    "adapter": adapted,
    "lora_r": of_adapter("adapter.rank", int),
    "lora_alpha": of_adapter("adapter.alpha", int),
    "lora_dropout": of_adapter("adapter.dropout", float),
    "lora_target_linear": lambda value, settings: (
        {"adapter.target_modules": "all-linear"}
        if arguments.flag(value) and settings.get("adapter")
        else NoEffect("off")
    ),
    "lora_target_modules": lambda value, settings: (
        NoEffect("lora_target_linear counts")
        if settings.get("lora_target_linear") or not value
        else {"adapter.target_modules": value if isinstance(value, str) else arguments.comma_list(value)}
    ),
    "lora_target_parameters": of_adapter("adapter.target_parameters", arguments.comma_list),
    "lora_modules_to_save": of_adapter("adapter.modules_to_save", arguments.comma_list),
    "lora_model_dir": of_adapter("adapter.path", str),
    "loraplus_lr_ratio": of_adapter("adapter.loraplus_lr_ratio", float),
    "peft_use_rslora": of_adapter("adapter.rslora", arguments.flag),
    "peft_use_dora": of_adapter("adapter.dora", arguments.flag),
    "lora_fan_in_fan_out": NoEffect("follows from the layer"),
    "load_in_4bit": lambda value, settings: (
        {"adapter.quantization": "4bit"} if value and settings.get("adapter") else NoEffect("off")
    ),
    "load_in_8bit": lambda value, settings: (
        {"adapter.quantization": "8bit"}
        if value and settings.get("adapter") and not settings.get("load_in_4bit")
        else NoEffect("off")
    ),
    "sequence_len": lambda value, _: {"batch.sequence_length": int(value)},
    "excess_length_strategy": lambda value, _: {
        "data.truncation": {"drop": "drop", "truncate": "right", "raise": "error"}[value]
    },
    "max_packed_sequence_len": NoEffect("batch.sequence_length"),
    "sample_packing": lambda value, _: {"data.packing": arguments.flag(value)},
    "micro_batch_size": arguments.global_batch,
    "batch_size": NoEffect("micro_batch_size and gradient_accumulation_steps say it"),
    "num_epochs": arguments.epochs,
    "optimizer": arguments.optimizer,
    "lr_scheduler": schedule,
    "cosine_min_lr_ratio": NoEffect("read with lr_scheduler"),
    "cosine_constant_lr_ratio": NoEffect("read with lr_scheduler"),
    "adam_eps": lambda value, _: {"optimizer.epsilon": arguments.number(value)},
    "lr_groups": NoEqual("optimizer.groups"),
    "train_on_inputs": lambda value, _: {"data.train_on": "all" if value else "assistant"},
    "chat_template": lambda value, _: TEMPLATES.get(value, NoEffect("the tokenizer's own chat template")),
    "chat_template_jinja": NoEqual("tokenizer.chat_template: a file with that text"),
    "special_tokens": tokens,
    "tokens": NoEqual("a tokenizer with these tokens, by tokenizer.path"),
    "bf16": mixed("bf16"),
    "bfloat16": mixed("bf16"),
    "fp16": mixed("fp16"),
    "float16": mixed("fp16"),
    "fp32": lambda value, _: {"precision": "fp32"},
    "gradient_checkpointing": recomputation,
    "activation_offloading": lambda value, _: (
        {"memory.activation_checkpointing": "offload"} if arguments.flag(value) else NoEffect("off")
    ),
    "flash_attention": arguments.ATTENTION,
    "sdp_attention": arguments.ATTENTION,
    "flex_attention": arguments.ATTENTION,
    "liger_rms_norm": liger,
    "liger_glu_activation": liger,
    "liger_layer_norm": liger,
    "liger_rope": liger,
    "liger_fused_linear_cross_entropy": arguments.if_on({"loss.implementation": "liger"}),
    "cut_cross_entropy": NoEffect("loss.implementation: auto never holds all logits"),
    "val_set_size": held_out,
    "evals_per_epoch": per_epoch("evaluate"),
    "eval_steps": steps_between("evaluate"),
    "saves_per_epoch": per_epoch("checkpoint"),
    "save_steps": steps_between("checkpoint"),
    "early_stopping_patience": "evaluate.patience",
    "wandb_project": lambda value, _: {"logging.trackers": ["wandb"]} if value else NoEffect("off"),
    "use_tensorboard": arguments.if_on({"logging.trackers": ["tensorboard"]}),
    "use_swanlab": arguments.if_on({"logging.trackers": ["swanlab"]}),
    "trackio_project_name": lambda value, _: {"logging.trackers": ["trackio"]} if value else NoEffect("off"),
    "torch_compile": arguments.if_on({"compile": "regional"}),
    "gradient_accumulation_kwargs": NoEffect("a step's loss is one mean over its tokens"),
    "unfrozen_parameters": NoEqual("optimizer.groups with frozen: true for the others"),
    "model_config": NoEqual("model.overrides"),
    "overrides_of_model_config": "model.overrides",
    "auto_resume_from_checkpoints": NoEffect("the same command resumes"),
    "plugins": NoEffect("what they add is read key by key"),
    "eot_tokens": NoEffect("the token that ends a turn is read off the chat template"),
    "group_by_length": arguments.if_on({"data.group_by_length": True}),
    "shuffle_merged_datasets": NoEffect("rows are shuffled"),
    "context_parallel_size": NoEqual("a strategy with context parallelism, such as configs/fsdp_cp.yaml"),
    "tensor_parallel_size": NoEqual("a strategy with tensor parallelism, such as configs/fsdp_tp.yaml"),
    "expert_parallel_size": NoEqual("a strategy with expert parallelism, such as configs/fsdp_ep.yaml"),
    "dp_replicate_size": NoEqual("configs/hsdp.yaml"),
    "noisy_embedding_alpha": NoEqual("dropout by model.overrides"),
    "gptq": NoEqual("adapter.quantization: 4bit"),
    "loss_watchdog_threshold": NoEqual("numerics.rollback_ratio"),
    "dataset_exact_deduplication": NoEqual("rows without duplicates"),
}
RULES |= dict.fromkeys(
    (
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id wandb_mode swanlab_project swanlab_mode "
        "swanlab_experiment_name swanlab_description swanlab_log_completions trackio_run_name trackio_space_id "
        "mlflow_run_name mlflow_tracking_uri mlflow_experiment_name hf_mlflow_log_artifacts debug eval_table_size "
        "strict "
    ).split(),
    arguments.SHOWN,
)
RULES |= dict.fromkeys(
    (
        "dataset_prepared_path dataset_processes dataset_num_proc pad_to_sequence_len eval_sample_packing "
        "eval_batch_size skip_prepare_dataset push_dataset_to_hub hf_use_auth_token tokenizer_use_fast "
        "tokenizer_legacy tokenizer_type tokenizer_use_mistral_common model_type processor_type "
        "is_llama_derived_model device_map ddp_backend torchdistx_path low_cpu_mem_usage xformers_attention "
        "gpu_memory_limit flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_on_cpu flash_optimum experimental_skip_move_to_device "
        "use_kernels flex_attn_compile_kwargs loss_watchdog_patience gptq_groupsize gptq_model_v1 "
        "liger_rms_norm_gated resize_token_embeddings_to_32x experts_implementation fused_attn_kernel "
        "gemma4_hybrid_attn_impl use_scattermoe use_sonicmoe freeze_mm_modules fsdp_version "
    ).split(),
    arguments.MACHINE,
)
RULES |= dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "dp_shard_size"), arguments.STRATEGY)
TRAINER = Trainer("axolotl", RULES, defaults, task)
