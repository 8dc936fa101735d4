"""LLaMA-Factory: `llamafactory-cli train FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samecurve.config.trainers import arguments
from samecurve.config.trainers.translation import NoEffect, NoEqual, Rule, Settings, Trainer
from samecurve.errors import ConfigurationError
from samecurve.storage.records import read_record

STAGES = {"pt": "continue_pretrain", "sft": "sft", "dpo": "dpo", "kto": "dpo", "rm": "reward"}
LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
# the columns of dataset_info.json, and the recipe's keys of them
COLUMNS = {"messages": "data.messages_column", "chosen": "data.chosen_column", "rejected": "data.rejected_column"}
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}


def task(settings: Settings) -> str:
    if "model" in settings:
        raise ConfigurationError("model: a key of LLaMA-Factory's v1, which is not read; give a file of its stages")
    if "dataset" not in settings:
        raise ConfigurationError("dataset: missing; the file is one for inference or an export, and trains nothing")
    stage = settings.get("stage", "sft")
    if stage not in STAGES:
        raise ConfigurationError(f"stage: found {stage}, which has no task here; {', '.join(STAGES)} have one")
    kind = settings.get("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        raise ConfigurationError(f"finetuning_type: found {kind}, which is not built here; lora and full are")
    return STAGES[stage]


def defaults(settings: Settings) -> dict[str, Any]:
    given = arguments.DEFAULTS | {"cutoff_len": 2048, "packing": settings.get("stage") == "pt"}
    given |= {"disable_gradient_checkpointing": False}
    given |= {"train_on_prompt": False} if settings.get("stage", "sft") in ("sft", "dpo", "kto") else {}
    given |= {"simpo_gamma": 0.5} if settings.get("pref_loss") == "simpo" else {}
    if settings.get("finetuning_type", "lora") == "full":
        return given
    rank = int(settings.get("lora_rank") or 8)
    return given | {"lora_rank": rank, "lora_alpha": 2 * rank, "lora_target": "all"}


def adapter(key: str, kind: Any) -> Any:
    def rule(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
        if settings.get("finetuning_type", "lora") != "lora" or value is None:
            return NoEffect("without finetuning_type: lora")
        if settings.get("adapter_name_or_path") and key not in ("adapter.path", "adapter.loraplus_lr_ratio"):
            return NoEffect("the adapter in adapter_name_or_path says it")
        return {key: kind(value)}

    return rule


def data_set(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    """Look the names up in dataset_dir/dataset_info.json."""
    names = arguments.comma_list(value)
    path = Path(str(settings.get("dataset_dir", "data")), "dataset_info.json")
    table = read_record(path).value
    if table is None:
        known = f"there is no {path.resolve()}, which says where {', '.join(names)} is"
        return NoEqual(f"data.path: {known}; start adopt where the trainer starts, or with data.path=...")
    if missing := [name for name in names if name not in table]:
        return NoEqual(f"data.path: {path} has no {missing[0]}")
    parts = [source(table[name], path.parent) for name in names]
    if len(parts) == 1:
        return parts[0]
    keys = {"data.path": "path", "data.config": "config", "data.split": "split", "data.max_samples": "max_samples"}
    keys |= {f"data.{name}_column": f"{name}_column" for name in ("text", "messages", "prompt", "completion")}
    rows = [{keys[key]: part[key] for key in part if key in keys} | {"weight": 1.0} for part in parts]
    if most := int(settings.get("max_samples") or 0):  # of each data set
        rows = [row | {"max_samples": min(most, row.get("max_samples", most))} for row in rows]
    return {"data.mixture": rows}


def most_rows(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    if not value:
        return NoEffect("off")
    is_mixture = "data.mixture" in (parts if isinstance(parts := data_set(settings["dataset"], settings), dict) else {})
    return {} if is_mixture else {"data.max_samples": int(value)}


def source(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe's keys of one entry."""
    here = entry.get("hf_hub_url") or entry.get("ms_hub_url") or str(folder / entry.get("file_name", ""))
    values = {"data.path": here}
    values |= {"data.config": entry["subset"]} if entry.get("subset") else {}
    values |= {"data.split": entry["split"]} if entry.get("split", "train") != "train" else {}
    values |= {"data.max_samples": entry["num_samples"]} if entry.get("num_samples") else {}
    columns = entry.get("columns", {})
    values |= {COLUMNS[name]: column for name, column in columns.items() if name in COLUMNS and column != name}
    # of alpaca's columns the usual names are recognized; a plain text has one
    own = {name: column for name, column in columns.items() if name in ALPACA and column != ALPACA[name]}
    if "prompt" in own and not columns.keys() & {"response", "messages", "chosen", "rejected"}:
        values["data.text_column"] = own["prompt"]
    elif own.keys() & {"prompt", "response"}:
        answered = {name: columns.get(name, ALPACA[name]) for name in ("prompt", "response")}
        values["data.prompt_column"] = answered["prompt"]
        values |= {"data.completion_column": answered["response"]} if "response" in columns else {}
    return values


def held_out(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    if not arguments.number(value or 0):
        return NoEffect("off")
    if arguments.number(value) < 1:
        return {"data.validation_fraction": arguments.number(value)}
    return NoEqual("data.validation_fraction, a share of the rows")


def preference_loss(value: Any, settings: Settings) -> dict[str, Any] | NoEffect | NoEqual:
    if settings.get("stage") != "dpo":
        return NoEffect("of stage: dpo")
    return {"dpo.loss": LOSSES[value]} if value in LOSSES else NoEqual(f"dpo.loss: one of {', '.join(LOSSES.values())}")


def packing(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    if arguments.flag(settings.get("neat_packing")):
        return {"data.packing": True}
    if arguments.flag(settings.get("packing")):
        return NoEqual("data.packing: documents of a row never attend to each other, as with neat_packing")
    return {"data.packing": False}


def stage(value: Any, settings: Settings) -> dict[str, Any] | NoEffect:
    if value == "kto":
        return {"dpo.loss": "kto"}
    reason = "the task"
    if value == "pt" or arguments.flag(settings.get("train_on_prompt")):
        reason += (
            "; the mean over tokens counts the first one of each row there, which is no target (transformers before "
            "PR 46204): losses and gradients are those of this run times tokens / (tokens + rows)"
        )
    if value == "dpo" and settings.get("pref_loss") == "ipo":
        reason += "; with TRL 0.24 pref_loss: ipo is the sigmoid loss of mean log-likelihoods there, not IPO"
    return NoEffect(reason)


def train_on(value: Any, settings: Settings) -> dict[str, Any]:
    """Of preferences everything behind the prompt is compared there, as in TRL."""
    if settings.get("stage", "sft") != "sft":
        return {"data.train_on": "completion"}
    return {"data.train_on": "all" if arguments.flag(value) else "assistant"}


def template(value: Any, settings: Settings) -> NoEffect:
    reason = "the tokenizer's own chat template; `samecurve inspect` shows the tokens"
    if settings.get("stage", "sft") == "sft" and not arguments.flag(settings.get("train_on_prompt")):
        reason += (
            "; a line break that it writes behind the end of an answer, as ChatML's, is trained there, too, and here "
            "with a tokenizer.chat_template whose {% generation %} marks include it"
        )
    return NoEffect(reason)


def evaluation_rows(value: Any, settings: Settings) -> dict[str, Any] | NoEqual:
    answer = data_set(value, settings) if value else {}
    if isinstance(answer, dict) and "data.path" in answer:
        return {"evaluate.path": answer["data.path"]}
    return NoEqual("evaluate.path: one data set")


RULES: dict[str, Rule] = arguments.RULES | {
    "stage": stage,
    "kto_chosen_weight": "dpo.desirable_weight",
    "kto_rejected_weight": "dpo.undesirable_weight",
    "finetuning_type": lambda value, settings: {"adapter.name": "lora"} if value == "lora" else {},
    "dataset": data_set,
    "dataset_dir": NoEffect("read with dataset"),
    "eval_dataset": evaluation_rows,
    "template": template,
    "enable_thinking": lambda value, settings: {
        "data.chat_template_kwargs": {"enable_thinking": arguments.flag(value)}
    },
    "default_system": NoEqual("a system message in the rows"),
    "cutoff_len": lambda value, settings: {"batch.sequence_length": int(value)},
    "max_samples": most_rows,
    "val_size": held_out,
    "packing": packing,
    "neat_packing": packing,
    "streaming": arguments.if_on({"data.streaming": True}),
    "buffer_size": NoEffect("of a stream that is shuffled by data.streaming"),
    "mix_strategy": lambda value, _: NoEffect("data.mixture") if value == "concat" else NoEqual("data.mixture"),
    "interleave_probs": NoEqual("data.mixture's weights"),
    "train_on_prompt": train_on,
    "mask_history": NoEqual("`train: false` in the turns that are not trained"),
    "disable_gradient_checkpointing": lambda value, _: {
        "memory.activation_checkpointing": "none" if arguments.flag(value) else "full"
    },
    "flash_attn": arguments.ATTENTION,
    "enable_liger_kernel": arguments.if_on({"model.kernels": "liger", "loss.implementation": "liger"}),
    "pure_bf16": arguments.if_on({"precision": "bf16", "optimizer.name": "adamw_bf16"}),
    "use_muon": arguments.if_on({"optimizer.name": "muon"}),
    "model_revision": "model.revision",
    "adapter_name_or_path": adapter("adapter.path", str),
    "lora_rank": adapter("adapter.rank", int),
    "lora_alpha": adapter("adapter.alpha", int),
    "lora_dropout": adapter("adapter.dropout", float),
    "lora_target": adapter(
        "adapter.target_modules", lambda value: "all-linear" if value == "all" else arguments.comma_list(value)
    ),
    "additional_target": adapter("adapter.modules_to_save", arguments.comma_list),
    "loraplus_lr_ratio": adapter("adapter.loraplus_lr_ratio", float),
    "use_rslora": adapter("adapter.rslora", arguments.flag),
    "use_dora": adapter("adapter.dora", arguments.flag),
    "create_new_adapter": NoEqual("adapter.path goes on with the adapter"),
    "quantization_bit": lambda value, _: (
        {"adapter.quantization": f"{value}bit"}
        if int(value or 0) in (4, 8)
        else NoEqual("adapter.quantization: 4bit, 8bit")
    ),
    "quantization_method": lambda value, _: NoEffect("always") if value in ("bnb", "bitsandbytes") else NoEqual("bnb"),
    "quantization_type": lambda value, _: NoEffect("always") if value == "nf4" else NoEqual("NF4"),
    "double_quantization": NoEqual("adapter.quantization: 4bit"),
    "pref_beta": lambda value, settings: (
        {"dpo.beta": arguments.number(value)} if settings.get("stage") in ("dpo", "kto") else NoEffect("of dpo and kto")
    ),
    "pref_loss": preference_loss,
    "pref_ftx": NoEqual("dpo.loss: orpo, which has the answer's likelihood in it"),
    "dpo_label_smoothing": lambda value, _: {"dpo.label_smoothing": arguments.number(value)},
    "simpo_gamma": lambda value, _: {"dpo.gamma": arguments.number(value)},
    "resize_vocab": NoEffect("the embedding grows where the tokenizer has more tokens"),
    "upcast_layernorm": NoEffect("weights are trained in fp32"),
    "rope_scaling": NoEqual("model.overrides: rope_parameters"),
    "moe_aux_loss_coef": NoEqual("model.router_loss, and the config's router_aux_loss_coef by model.overrides"),
    "compute_accuracy": NoEffect("eval_perplexity; a classifier has eval_accuracy"),
    "predict_with_generate": NoEqual("evaluate.samples"),
    "tokenized_path": NoEffect("rows are cached by their content"),
    "use_unsloth": NoEqual("model.kernels: liger"),
}
_VISION = "image_max_pixels image_min_pixels media_dir video_max_pixels video_fps video_maxlen freeze_vision_tower"
for _key in _VISION.split():
    RULES[_key] = NoEffect("texts alone are trained, and towers stay frozen")
RULES["freeze_multi_modal_projector"] = RULES["freeze_vision_tower"]
for _key in (
    "use_fast_tokenizer",
    "preprocessing_batch_size",
    "infer_backend",
    "cache_dir",
    "hf_hub_token",
    "print_param_status",
):
    RULES[_key] = arguments.MACHINE
TRAINER = Trainer("LLaMA-Factory", RULES, defaults, task)
