"""Configurations of LLaMA-Factory and TRL, with small models and data in the place of theirs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "unit"))
from chat_templates import make_tokenizer
from safetensors.torch import save_file

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"bf16": False, "logging_steps": 1, "report_to": "none", "output_dir": "peer", "num_train_epochs": 3}
SMALL |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
FACTORY = {"model_name_or_path": "model", "dataset": "rows", "dataset_dir": ".", "deepspeed": None, "plot_loss": False}
FACTORY |= {"dataloader_num_workers": 0, "preprocessing_num_workers": 1}
ONE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"use_peft": True, "lora_dropout": 0.0, "learning_rate": 1e-4}
ALL_LORA = LORA | {"lora_r": 8, "lora_alpha": 16, "lora_target_modules": "all-linear"}
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUM_ROWS = 8


class Case(NamedTuple):
    """Attributes:
    name: of the configuration, and what of it was changed.
    trainer: `llama-factory`, or the method of TRL.
    rows: the kind of data.
    changes: of the configuration's keys; None takes a key out.
    example: the file in LLaMA-Factory's examples, None of TRL.
    template: of the model's tokenizer, of tests/unit/chat_templates.py.
    marked: whether the recipe gets MARKED, which trains the line break behind an answer.
    counts_first: whether the trainer's mean counts the first token of each row, which is no target.
    """

    name: str
    trainer: str
    rows: str
    changes: dict[str, Any]
    example: str | None = None
    template: str = "chatml"
    marked: bool = False
    counts_first: bool = False


def shown(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in values.items() if value is not None)


def factory(example: str, rows: str, template: str = "qwen3_nothink", **options: Any) -> Case:
    facts = {key: options.pop(key) for key in ("marked", "counts_first") if key in options}
    said = shown(options | ({} if template[:5] in example else {"template": template}))
    name = f"`{example}`{': ' * bool(said)}{said}; {rows}"
    tokenizer = "llama3" if template == "llama3" else "chatml"
    return Case(name, "llama-factory", rows, options | {"template": template}, example, tokenizer, **facts)


def trl(method: str, rows: str, **changes: Any) -> Case:
    said = shown({key: value for key, value in changes.items() if key not in LORA or key == "use_peft"})
    return Case(f"`trl {method}`{': ' * bool(said)}{said}; {rows}", method, rows, changes)


FULL, LORA_SFT = "train_full/qwen3_full_sft", "train_lora/qwen3_lora_sft"
PRETRAIN, DPO, KTO, REWARD = (f"train_lora/qwen3_lora_{stage}" for stage in ("pretrain", "dpo", "kto", "reward"))
CASES = [
    factory(FULL, "alpaca", marked=True),
    factory(FULL, "sharegpt", marked=True),
    factory(FULL, "sharegpt", marked=True, neat_packing=True, gradient_accumulation_steps=1),
    factory(FULL, "sharegpt", "llama3"),
    factory(FULL, "sharegpt", train_on_prompt=True, counts_first=True),
    factory(FULL, "sharegpt", mask_history=True, marked=True),
    factory(FULL, "sharegpt", marked=True, packing=True, gradient_accumulation_steps=1),
    factory(LORA_SFT, "alpaca", marked=True),
    factory(LORA_SFT, "sharegpt", marked=True, weight_decay=0.1, lr_scheduler_type="linear", max_grad_norm=0.5),
    factory("extras/loraplus/llama3_lora_sft", "alpaca", "llama3"),
    factory("extras/muon/qwen2_full_sft", "alpaca", marked=True),
    factory(PRETRAIN, "text", packing=False, counts_first=True),
    factory(PRETRAIN, "text", cutoff_len=247, gradient_accumulation_steps=1),
    factory(DPO, "preference"),
    factory(DPO, "preference", pref_loss="orpo"),
    factory(DPO, "preference", pref_loss="simpo"),
    factory(DPO, "preference", pref_loss="ipo", pref_beta=0.3),
    factory(DPO, "preference", "llama3", dpo_label_smoothing=0.1),
    factory(KTO, "feedback"),
    factory(KTO, "feedback", "llama3", kto_chosen_weight=0.5, **ONE_BATCH),
    factory(REWARD, "preference"),
    factory(REWARD, "preference", "llama3"),
    trl("sft", "messages"),
    trl("sft", "prompts"),
    trl("sft", "prompts_text"),
    trl("sft", "text", lr_scheduler_type="cosine", warmup_steps=1),
    trl("sft", "messages", assistant_only_loss=True, chat_template_path="marked.jinja"),
    trl("sft", "messages", packing=True, gradient_accumulation_steps=1, max_length=2048),
    trl("sft", "messages", lr_scheduler_type="constant_with_warmup", warmup_steps=1),
    trl("sft", "messages", weight_decay=0.1, max_grad_norm=0.5),
    trl("sft", "messages", **ALL_LORA),
    trl("sft", "messages", **LORA),
    trl("sft", "messages", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}),
    trl("dpo", "pairs", beta=0.2),
    trl("dpo", "pairs", loss_type=["ipo"]),
    trl("dpo", "pairs", label_smoothing=0.1),
    trl("dpo", "pairs", **ALL_LORA),
    trl("kto", "judged", desirable_weight=0.5, **ONE_BATCH),
    trl("reward", "pairs", center_rewards_coefficient=0.01),
    trl("reward", "bare_pairs"),
]


def say(index: int, turn: int = 1) -> str:
    return " ".join(f"{word} {index * n}" for n in range(turn, turn + 1 + index % 3) for word in ("one", "or two"))


def turns(index: int, *keys: str) -> list[dict[str, str]]:
    """One question and answer, or two."""
    role, content, user, assistant = keys
    return [{role: who, content: say(index, turn)} for turn in range(1, 2 + index % 2) for who in (user, assistant)]


def rows_of(kind: str) -> list[dict[str, Any]]:
    """NUM_ROWS rows of different lengths."""
    sharegpt, messages = ("from", "value", "human", "gpt"), ("role", "content", "user", "assistant")

    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    make = {
        "alpaca": lambda n: {"instruction": say(n), "input": "" if n % 2 else say(n, 2), "output": say(n + 1)},
        "sharegpt": lambda n: {"conversations": turns(n, *sharegpt)},
        "preference": lambda n: {
            "conversations": turns(n, *sharegpt)[:1],
            "chosen": {"from": "gpt", "value": say(n, 3)},
            "rejected": {"from": "gpt", "value": say(n + 1, 4)},
        },
        "feedback": lambda n: {"messages": turns(n, *messages), "label": n % 3 > 0},
        "text": lambda n: {"text": say(n, 4)},
        "messages": lambda n: {"messages": turns(n, *messages)},
        "prompts": lambda n: {"prompt": turns(n, *messages)[:1], "completion": answer(say(n, 3))},
        "prompts_text": lambda n: {"prompt": say(n), "completion": say(n, 3)},
        "judged": lambda n: {"prompt": turns(n, *messages)[:1], "completion": answer(say(n, 3)), "label": n % 3 > 0},
        "pairs": lambda n: {
            "prompt": turns(n, *messages)[:1],
            "chosen": answer(say(n, 3)),
            "rejected": answer(say(n + 1, 4)),
        },
        "bare_pairs": lambda n: {
            "chosen": turns(n, *messages)[:1] + answer(say(n, 3)),
            "rejected": turns(n, *messages)[:1] + answer(say(n + 1, 4)),
        },
    }[kind]
    return [make(index) for index in range(NUM_ROWS)]


_SHAREGPT = {"formatting": "sharegpt", "columns": {"messages": "conversations"}}
_ANSWERS = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
INFORMATION = {
    "alpaca": {},
    "text": {"columns": {"prompt": "text"}},
    "sharegpt": _SHAREGPT,
    "preference": _SHAREGPT | {"ranking": True, "columns": _ANSWERS},
    "feedback": {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": _TAGS},
}


def write_inputs(case: Case, folder: Path, examples: Path | None) -> None:
    """Write the model, the adapter, the rows and the configuration. examples: LLaMA-Factory's folder of this name."""
    tokenizer = make_tokenizer(case.template)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), initializer_range=0.2, **SIZES)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id, config.summary_dropout_prob = tokenizer.bos_token_id, 0.0  # of LLaMA-Factory's rewards
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    config.num_labels = 1
    scores = AutoModelForSequenceClassification.from_config(config)
    scores.model.load_state_dict(model.model.state_dict())
    scores.save_pretrained(folder / "scores")
    for name in ("model", "scores"):
        tokenizer.save_pretrained(folder / name)
    if case.changes.get("use_peft") or "lora" in str(case.example):
        is_default = case.example is None and "lora_r" not in case.changes  # TRL's
        rank, targets = (16, ["q_proj", "v_proj"]) if is_default else (8, LINEAR)
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora)
        adapted.peft_config["default"].base_model_name_or_path = "model"
        adapted.save_pretrained(str(folder / "adapter"))
    if case.example == REWARD:  # which has the head's weights in a file beside the adapter
        head = {"v_head.summary.weight": scores.score.weight.detach(), "v_head.summary.bias": torch.zeros(1)}
        save_file(head, folder / "adapter" / "value_head.safetensors")
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=LINEAR, task_type="SEQ_CLS")
        adapted_scores = get_peft_model(scores, lora)
        weights = {name: weight for name, weight in adapted.state_dict().items() if "lora_" in name}
        adapted_scores.load_state_dict(weights, strict=False)
        adapted_scores.peft_config["default"].base_model_name_or_path = "scores"
        adapted_scores.save_pretrained(str(folder / "adapter_of_scores"))
    (folder / "marked.jinja").write_text(MARKED)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(case.rows)))
    if case.example:
        entry = {"file_name": "rows.jsonl"} | INFORMATION[case.rows]
        (folder / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings_of(case, examples)))


def settings_of(case: Case, examples: Path | None) -> dict[str, Any]:
    if case.example is None:
        model = "scores" if case.trainer == "reward" else "model"
        given = {"model_name_or_path": model, "dataset_name": "rows.jsonl"} | SMALL
    else:
        assert examples is not None
        given = yaml.safe_load((examples / f"{case.example}.yaml").read_text()) | SMALL | FACTORY
        given |= {"adapter_name_or_path": "adapter"} if "lora" in case.example else {}
    return {key: value for key, value in (given | case.changes).items() if value is not None}
