"""Train configurations under the trainer that they are of, and by the recipes that `adopt --config` makes of them.

    python -m benchmarks.trainers.compare --trl FOLDER --llama_factory CHECKOUT --python PYTHON [--only WORD]

FOLDER has TRL, and PYTHON the packages that LLaMA-Factory asks for, whose own examples are taken out of CHECKOUT. The
models have two layers and random weights, the data 8 rows, which are one step; all steps are compared, in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.markdown import table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "unit"))
from chat_templates import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"bf16": False, "logging_steps": 1, "report_to": "none", "output_dir": "peer"}
SMALL |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_train_epochs": 2}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


class Case(NamedTuple):
    """Attributes:
    trainer: `llama-factory`, or the method of TRL.
    example: the file in LLaMA-Factory's examples, None of TRL.
    changes: of its keys, and further ones; None takes a key out.
    rows: the data.
    model: the stand-in's folder.
    """

    name: str
    trainer: str
    changes: dict[str, Any]
    rows: str
    example: str | None = None
    model: str = "chatml"

    @property
    def adapter(self) -> str | None:
        """The folder of the adapter that both start from."""
        return f"{self.model}-adapter" if self.changes.get("use_peft") or "lora" in str(self.example) else None


def factory(example: str, rows: str, model: str = "chatml", **changes: Any) -> Case:
    said = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in changes.items() if value is not None)
    return Case(f"{example}{': ' * bool(said)}{said}", "llama-factory", changes, rows, example, model)


def trl(method: str, rows: str, **changes: Any) -> Case:
    shown = {key: value for key, value in changes.items() if key not in LORA or key == "use_peft"}
    said = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in shown.items())
    return Case(f"{method} of {rows}{', ' * bool(said)}{said}", method, changes, rows)


CASES = [
    factory("train_full/qwen3_full_sft.yaml", "alpaca", deepspeed=None),
    factory("train_full/qwen3_full_sft.yaml", "sharegpt", deepspeed=None, train_on_prompt=True),
    factory("train_full/qwen3_full_sft.yaml", "sharegpt", deepspeed=None, mask_history=True),
    factory(
        "train_full/qwen3_full_sft.yaml", "sharegpt", deepspeed=None, neat_packing=True, gradient_accumulation_steps=1
    ),
    factory("train_lora/qwen3_lora_sft.yaml", "sharegpt"),
    factory("train_lora/qwen3_lora_sft.yaml", "alpaca", weight_decay=0.1, lr_scheduler_type="linear", warmup_steps=1),
    factory("train_lora/qwen3_lora_pretrain.yaml", "text", cutoff_len=64),
    factory("train_lora/qwen3_lora_pretrain.yaml", "text", packing=False),
    factory("train_lora/qwen3_lora_dpo.yaml", "preference"),
    factory("train_lora/qwen3_lora_dpo.yaml", "preference", pref_loss="orpo"),
    factory("train_lora/qwen3_lora_dpo.yaml", "preference", pref_loss="simpo"),
    factory("train_lora/qwen3_lora_dpo.yaml", "preference", pref_loss="ipo", dpo_label_smoothing=0.1),
    factory("train_lora/qwen3_lora_reward.yaml", "preference"),
    factory("extras/loraplus/llama3_lora_sft.yaml", "alpaca", "llama3"),
    factory("extras/pissa/llama3_lora_sft.yaml", "alpaca", "llama3"),
    trl("sft", "messages", assistant_only_loss=True, max_length=512),
    trl("sft", "messages", packing=True, gradient_accumulation_steps=1, max_length=2048),
    trl("sft", "text", lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1),
    trl("sft", "messages", **LORA, lr_scheduler_type="constant_with_warmup", warmup_steps=1),
    trl("sft", "messages", padding_free=True, max_grad_norm=0.5),
    trl("sft", "messages", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}),
    trl("dpo", "pairs", beta=0.2),
    trl("dpo", "pairs", **LORA, loss_type=["ipo"]),
    trl("reward", "pairs", center_rewards_coefficient=0.01),
    factory("extras/muon/qwen2_full_sft.yaml", "alpaca", template="qwen3_nothink"),
]


def say(index: int, turns: int = 1) -> str:
    return " ".join(f"{word} {index * n}" for n in range(turns, turns + 1 + index % 3) for word in ("one", "or two"))


def rows_of(kind: str) -> list[dict[str, Any]]:
    """8 rows of different lengths."""

    def turns(index: int, *keys: str) -> list[dict[str, str]]:
        role, content, user, assistant = keys
        return [
            {role: name, content: say(index, turn)} for turn in range(1, 2 + index % 2) for name in (user, assistant)
        ]

    sharegpt, messages = ("from", "value", "human", "gpt"), ("role", "content", "user", "assistant")
    make = {
        "alpaca": lambda n: {"instruction": say(n), "input": "" if n % 2 else say(n, 2), "output": say(n + 1)},
        "sharegpt": lambda n: {"conversations": turns(n, *sharegpt)},
        "preference": lambda n: {
            "conversations": turns(n, *sharegpt)[:1],
            "chosen": {"from": "gpt", "value": say(n, 3)},
            "rejected": {"from": "gpt", "value": say(n + 1, 4)},
        },
        "pairs": lambda n: {
            "prompt": turns(n, *messages)[:1],
            "chosen": [{"role": "assistant", "content": say(n, 3)}],
            "rejected": [{"role": "assistant", "content": say(n + 1, 4)}],
        },
        "text": lambda n: {"text": say(n, 4)},
        "messages": lambda n: {"messages": turns(n, *messages)},
    }[kind]
    return [make(index) for index in range(8)]


COLUMNS = {"alpaca": {}, "text": {"columns": {"prompt": "text"}}}
COLUMNS["sharegpt"] = {"formatting": "sharegpt", "columns": {"messages": "conversations"}}
COLUMNS["preference"] = COLUMNS["sharegpt"] | {"ranking": True}
COLUMNS["preference"]["columns"] = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}


def make_inputs(folder: Path) -> None:
    for kind in ("chatml", "llama3"):
        tokenizer = make_tokenizer(kind)
        config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), initializer_range=0.2, **SIZES)
        config.pad_token_id, config.eos_token_id, config.bos_token_id = (
            tokenizer.pad_token_id,
            tokenizer.eos_token_id,
            tokenizer.bos_token_id,
        )
        config.summary_dropout_prob = 0.0  # of the head of LLaMA-Factory's rewards
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / kind)
        config.num_labels = 1
        scores = AutoModelForSequenceClassification.from_config(config)
        scores.model.load_state_dict(model.model.state_dict())
        scores.save_pretrained(folder / f"{kind}-scores")
        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=LINEAR, task_type="CAUSAL_LM"))
        adapted.peft_config["default"].base_model_name_or_path = kind
        adapted.save_pretrained(folder / f"{kind}-adapter")
        for name in ("", "-scores"):
            tokenizer.save_pretrained(folder / f"{kind}{name}")
    for kind in (*COLUMNS, "messages", "pairs"):
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind)))
    information = {kind: {"file_name": f"{kind}.jsonl"} | entry for kind, entry in COLUMNS.items()}
    (folder / "dataset_info.json").write_text(json.dumps(information))


def settings_of(case: Case, checkout: Path | None) -> dict[str, Any]:
    if case.example is None:
        given = {
            "model_name_or_path": case.model + "-scores" * (case.trainer == "reward"),
            "dataset_name": f"{case.rows}.jsonl",
        } | SMALL
    else:
        given = yaml.safe_load(Path(checkout, "examples", case.example).read_text()) | SMALL
        given |= {"model_name_or_path": case.model, "dataset": case.rows, "dataset_dir": "."}
        given |= {"dataloader_num_workers": 0, "preprocessing_num_workers": 1, "plot_loss": False}
        given |= {"adapter_name_or_path": case.adapter} if case.adapter else {}
    return {key: value for key, value in (given | case.changes).items() if value is not None}


def run(command: list[str], folder: Path, **environment: str) -> str:
    base = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | base | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def of_peer(case: Case, folder: Path, file: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    program = [str(ROOT / "benchmarks" / "trainers" / "peer.py"), case.trainer, file]
    if case.example:
        run([options.python, *program], folder, PYTHONPATH=str(options.llama_factory / "src"))
    else:
        adapter = [case.adapter] if case.adapter else []
        run([sys.executable, *program, *adapter], folder, PYTHONPATH=str(options.trl))
    states = folder.glob("peer/**/trainer_state.json")
    logs = [json.loads(path.read_text())["log_history"] for path in states]
    return [(line["loss"], line["grad_norm"]) for line in max(logs, key=len) if "loss" in line]


def of_recipe(case: Case, folder: Path, file: str, strategy: str) -> tuple[list[tuple[float, float]], list[str]]:
    """Loss and gradient norm of each step, and what adopt says has no equal."""
    adopt = [sys.executable, "-m", "samecurve", "adopt", "--config", file, "--output", "recipe.yaml"]
    adopt += [] if case.example else ["--trainer", "trl", "--method", case.trainer]
    said = run(adopt, folder, PYTHONPATH=str(ROOT))
    changes = ["output_dir=run", "logging.trackers=[]", "export.enabled=false"]
    changes += [f"adapter.path={case.adapter}"] if case.adapter else []
    changes += [f"model.path={case.model}-scores"] if "reward" in f"{case.example} {case.trainer}" else []
    launch = ["--num_processes", "2"] if strategy == "ddp" else []
    command = [sys.executable, str(ROOT / "train.py"), "recipe.yaml", *changes, "--strategy", strategy, *launch]
    run(command, folder, PYTHONPATH=str(ROOT))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    named = [line.partition("differs: ")[2] for line in said.splitlines() if line.startswith("NO EQUAL")]
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line], named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="a folder that TRL is installed in")
    parser.add_argument("--llama_factory", type=Path, help="a checkout")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of LLaMA-Factory")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--strategy", default="single", choices=("single", "ddp"))
    options = parser.parse_args()
    lines = []
    for case in CASES:
        if options.only not in case.name or not (options.llama_factory if case.example else options.trl):
            continue
        with TemporaryDirectory() as name:
            folder = Path(name)
            make_inputs(folder)
            (folder / "config.yaml").write_text(yaml.safe_dump(settings_of(case, options.llama_factory)))
            try:
                peer = of_peer(case, folder, "config.yaml", options)
                ours, named = of_recipe(case, folder, "config.yaml", options.strategy)
            except RuntimeError as error:
                print(case.name, error, sep="\n", flush=True)
                continue
        print(case.name, peer, ours, named, sep="\n    ", flush=True)
        least = min(len(peer), len(ours))
        difference = max(
            abs(a / b - 1) for x, y in zip(peer[:least], ours, strict=False) for a, b in zip(x, y, strict=True)
        )
        lines.append([case.name, len(peer), *(f"{n:.6f}" for n in (*peer[-1], *ours[-1])), f"{difference:.0e}"])
    columns = ["configuration", "steps", "its last loss", "and norm", "the recipe's", "and norm", "largest difference"]
    print(table(columns, lines))


if __name__ == "__main__":
    main()
