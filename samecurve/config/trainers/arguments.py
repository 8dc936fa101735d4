"""transformers' TrainingArguments, which TRL, LLaMA-Factory and ms-swift extend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from samecurve.config.trainers.translation import NoEffect, NoEqual, Rule, Settings

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "seed": 42,
    "save_steps": 500,
}
LENGTH = NoEffect("max_steps counts")
NO_WARMUP = NoEffect("a constant rate has no warm-up; constant_with_warmup has")
OPTIMIZERS = {"adamw": "adamw", "adafactor": "adafactor", "sgd": "sgd", "lion": "lion", "muon": "muon"}
UNLIKE = {
    "adafactor": "optimizer.name: adafactor, whose learning rate is relative to the size of the weights",
    "sgd": "optimizer.name: sgd, which has momentum (optimizer.momentum)",
}
SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "cosine_with_min_lr": ("cosine", 0.0),
    "warmup_stable_decay": ("wsd", 0.0),
}


def number(value: Any) -> float:
    """Read a number of YAML or of a command line, where 1e-4 is text."""
    return float(value)


def flag(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "1", "auto")


def global_batch(value: Any, settings: Settings) -> dict[str, Any]:
    """Rows per step: those of a device's batch, times accumulation, times processes."""
    rows = int(settings.get("per_device_train_batch_size") or settings.get("micro_batch_size") or 1)
    steps, processes = int(settings.get("gradient_accumulation_steps") or 1), int(settings.get("num_processes") or 1)
    return {"batch.micro_batch_size": rows, "batch.global_batch_size": rows * steps * processes}


def steps(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    return {"steps": int(value)} if int(value) > 0 else NoEffect("epochs count")


def epochs(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    return LENGTH if int(settings.get("max_steps") or 0) > 0 else {"epochs": number(value)}


def schedule(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    if value not in SCHEDULES:
        return NoEqual(f"schedule.name: one of constant, linear, cosine, wsd, not {value}")
    name, least = SCHEDULES[value]
    options = mapping(settings.get("lr_scheduler_kwargs"))
    values: dict[str, Any] = {"schedule.name": name, "schedule.delay_steps": 1}
    if value == "constant":  # transformers' constant schedule has no warm-up
        return values | {"schedule.warmup_steps": 0}
    if least is not None:
        rate = options.get("min_lr", 0) / number(settings.get("learning_rate") or 1)
        values["schedule.min_lr_ratio"] = number(options.get("min_lr_rate", options.get("min_lr_ratio", rate)))
    if name == "wsd":
        values["schedule.decay_steps"] = int(options.get("num_decay_steps", 0))
        if options.get("decay_type", "cosine") != "linear":
            values["lr_scheduler_kwargs.decay_type"] = NoEqual("schedule.name: wsd, whose decay is linear")
    return values


def _has_no_warmup(settings: Settings) -> bool:
    return settings.get("lr_scheduler_type", settings.get("lr_scheduler")) == "constant"


def warmup_steps(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    """A number below 1 is a share of the steps."""
    if _has_no_warmup(settings):
        return NO_WARMUP
    if not number(value) and settings.get("warmup_ratio"):
        return NoEffect("warmup_ratio counts")
    return {"schedule.warmup_ratio": number(value)} if 0 < number(value) < 1 else {"schedule.warmup_steps": int(value)}


def warmup_ratio(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    if _has_no_warmup(settings):
        return NO_WARMUP
    if number(settings.get("warmup_steps") or 0):
        return NoEffect("warmup_steps counts")
    return {"schedule.warmup_ratio": number(value)}


def optimizer(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    name = str(value).lower().removeprefix("paged_").removeprefix("optimizernames.")
    if re.fullmatch(r"adamw(_bnb|_torch)?_8bit", name):
        return {"optimizer.name": "adamw_8bit"}
    kind, _, rest = name.partition("_")
    if kind in OPTIMIZERS and not ({*rest.split("_")} & {"8bit", "4bit", "fp8", "anyprecision", "mini"}):
        unlike = {f"optim {kind}": NoEqual(UNLIKE[kind])} if kind in UNLIKE else {}
        return {"optimizer.name": OPTIMIZERS[kind], **unlike}
    return NoEqual(f"optimizer.name: adamw, or the import path of {value}'s class")


def betas(value: Any, settings: Settings) -> dict[str, Any]:
    return {
        "optimizer.betas": [number(settings.get(f"adam_beta{n}") or default) for n, default in ((1, 0.9), (2, 0.999))]
    }


def clip(value: Any, settings: Settings) -> dict[str, Any]:
    """0 is no clipping."""
    return {"optimizer.max_grad_norm": number(value) or 1e9}


def precision(name: str) -> Any:
    return lambda value, settings: {"precision": name} if flag(value) else NoEffect("off")


def recomputation(value: Any, settings: Settings) -> dict[str, Any]:
    return {"memory.activation_checkpointing": "full" if flag(value) else "none"}


def every(prefix: str, kind: str, unit: str) -> Any:
    """The rule of `save_steps` and `eval_steps`, and of the strategies that say what they count."""

    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
        strategy = str(settings.get(f"{unit}_strategy", settings.get(f"{prefix}_strategy", kind)))
        if strategy in ("no", "False"):
            return {f"{room}.every_steps": 0}
        if strategy == "epoch":
            return {f"{room}.every_epochs": 1.0}
        count = settings.get(f"{unit}_steps") or (settings.get("logging_steps") if unit == "eval" else None) or 500
        if 0 < number(count) < 1:
            return NoEqual(f"{room}.every_steps, in steps, or {room}.every_epochs")
        return {f"{room}.every_steps": int(number(count))}

    room = {"save": "checkpoint", "eval": "evaluate"}[unit]
    return rule


def trackers(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    names = [str(name) for name in (value if isinstance(value, list) else str(value).replace(",", " ").split())]
    names = [name for name in names if name not in ("none", "None", "all")]
    known = {"tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab"}
    unknown = [name for name in names if name not in known]
    return NoEqual(f"logging.trackers: without {', '.join(unknown)}") if unknown else {"logging.trackers": names}


def best(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    metric = str(settings.get("metric_for_best_model") or "eval_loss")
    metric = {"loss": "eval_loss", "accuracy": "eval_accuracy"}.get(metric, metric)
    if metric not in ("eval_loss", "eval_accuracy", "eval_f1"):
        return NoEqual(f"checkpoint.best: a metric of this run, not {metric}")
    exported = {"export.checkpoint": "best"} if flag(settings.get("load_best_model_at_end")) else {}
    return {"checkpoint.best": metric} | exported


def if_on(values: dict[str, Any]) -> Any:
    return lambda value, settings: values if flag(value) else NoEffect("off")


def mapping(value: Any) -> Mapping[str, Any]:
    """Read a mapping of YAML, or the JSON of a command line."""
    return value if isinstance(value, Mapping) else json.loads(value) if value else {}


def seed(value: Any, settings: Settings) -> dict[str, Any]:
    return {"seed": int(value)}


def comma_list(value: Any) -> list[str]:
    return [str(word).strip() for word in (value if isinstance(value, list) else str(value).replace(",", " ").split())]


WHERE = NoEffect("where and how a run is started: the launcher's command")
MACHINE = NoEffect("how the machine works, not what is computed")
ATTENTION = NoEffect("model.attention: auto takes the fastest that keeps packed documents apart")
SHOWN = NoEffect("what is shown or kept beside the run")
STRATEGY = NoEffect("the strategy, named below")
_STEPS = NoEffect("counted with per_device_train_batch_size")
RULES: dict[str, Rule] = {
    "model_name_or_path": "model.path",
    "output_dir": "output_dir",
    "per_device_train_batch_size": global_batch,
    "gradient_accumulation_steps": global_batch,
    "num_processes": global_batch,
    "num_train_epochs": epochs,
    "max_steps": steps,
    "learning_rate": lambda value, settings: {"optimizer.learning_rate": number(value)},
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": lambda value, settings: NoEffect("read with lr_scheduler_type"),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "optim": optimizer,
    "optim_args": NoEqual("optimizer.options, of an optimizer by import path"),
    "optim_target_modules": NoEqual("optimizer.groups"),
    "adam_beta1": betas,
    "adam_beta2": betas,
    "adam_epsilon": lambda value, settings: {"optimizer.epsilon": number(value)},
    "weight_decay": lambda value, settings: {"optimizer.weight_decay": number(value)},
    "max_grad_norm": clip,
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "tf32": NoEffect("of products in fp32; `precision` says how this run computes"),
    "gradient_checkpointing": recomputation,
    "activation_checkpointing": recomputation,
    "activation_checkpointing_kwargs": NoEffect("how layers are computed again, not what"),
    "gradient_checkpointing_kwargs": NoEffect("how layers are computed again, not what"),
    "torch_compile": if_on({"compile": "regional"}),
    "attn_implementation": ATTENTION,
    "use_liger_kernel": if_on({"model.kernels": "liger", "loss.implementation": "liger"}),
    "seed": seed,
    "data_seed": NoEffect("`seed` is that of the order of rows, too"),
    "full_determinism": NoEffect("one machine gives the same numbers again"),
    "group_by_length": if_on({"data.group_by_length": True}),
    "train_sampling_strategy": lambda value, _: (
        {"data.group_by_length": value == "group_by_length"}
        if value in ("random", "group_by_length")
        else NoEqual("data.group_by_length; else the order is by chance")
    ),
    "save_strategy": every("save", "steps", "save"),
    "save_steps": every("save", "steps", "save"),
    "save_total_limit": lambda value, _: {"checkpoint.keep": max(2, int(value))} if value else NoEffect("off"),
    "save_only_model": NoEffect("every checkpoint can be resumed"),
    "eval_strategy": every("evaluation", "no", "eval"),
    "evaluation_strategy": every("evaluation", "no", "eval"),
    "eval_steps": every("evaluation", "no", "eval"),
    "eval_on_start": NoEqual("`samecurve evaluate` of the model that the run starts from"),
    "eval_delay": NoEqual("evaluate.every_steps, from the first one on"),
    "per_device_eval_batch_size": NoEffect("metrics do not depend on it"),
    "eval_accumulation_steps": NoEffect("metrics do not depend on it"),
    "load_best_model_at_end": lambda value, settings: best(value, settings) if flag(value) else NoEffect("off"),
    "metric_for_best_model": best,
    "greater_is_better": NoEffect("follows from the metric"),
    "early_stopping_patience": "evaluate.patience",
    "logging_steps": lambda value, _: (
        {"logging.every_steps": int(number(value))} if number(value) >= 1 else NoEffect("metrics.jsonl has every step")
    ),
    "report_to": trackers,
    "dataloader_num_workers": lambda value, settings: {"data.num_workers": int(value)},
    "dataloader_drop_last": NoEffect("all steps have the same number of rows"),
    "remove_unused_columns": NoEffect("data.ignore_columns names what is not read"),
    "average_tokens_across_devices": NoEffect("always"),
    "neftune_noise_alpha": NoEqual("adapter.dropout, or dropout by model.overrides"),
    "label_smoothing_factor": NoEqual("dpo.label_smoothing, of a preference loss"),
    "auto_find_batch_size": NoEqual("batch.micro_batch_size: auto"),
    "trust_remote_code": NoEffect("set model.trust_remote_code yourself if the model brings Python files of its own"),
    "parallelism_config": NoEqual("a strategy of configs/ with the same sizes"),
    "accelerator_config": NoEffect("the order of rows is the same on any number of processes"),
    "resume_from_checkpoint": NoEqual("`samecurve adopt PATH RECIPE` goes on from that checkpoint"),
    "push_to_hub": NoEqual("`samecurve export RUN --push OWNER/NAME`, behind the run"),
    "fp8": NoEqual("fp8: tensorwise or rowwise"),
}
RULES |= dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "accelerate_config"), STRATEGY)
RULES |= dict.fromkeys(
    (
        "logging_dir logging_first_step logging_strategy logging_nan_inf_filter log_level log_level_replica "
        "run_name project disable_tqdm include_num_input_tokens_seen include_tokens_per_second hub_model_id "
        "hub_token hub_strategy hub_private_repo hub_always_push hub_revision trackio_space_id plot_loss "
        "skip_memory_metrics debug logging_on_each_node log_on_each_node save_on_each_node include_for_metrics "
        "batch_eval_metrics prediction_loss_only eval_do_concat_batches liger_kernel_config trackio_bucket_id "
        "trackio_static_space_id "
    ).split(),
    SHOWN,
)
RULES |= dict.fromkeys(
    (
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor ddp_timeout ddp_backend "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph "
        "torch_compile_backend torch_compile_mode torch_empty_cache_steps use_cpu local_rank "
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint label_names "
        "length_column_name use_cache bf16_full_eval fp16_full_eval preprocessing_num_workers overwrite_cache "
        "dataset_num_proc overwrite_output_dir do_train do_eval do_predict jit_mode_eval low_cpu_mem_usage "
        "past_index eval_use_gather_object dataloader_in_order dataloader_multiprocessing_context "
    ).split(),
    MACHINE,
)
RULES |= {
    "overwrite_output_dir": NoEffect("--fresh starts over"),
    "do_predict": NoEqual("`samecurve predict`, behind it"),
}
