"""Configurations of TRL, LLaMA-Factory, axolotl and ms-swift, which `adopt --config` turns into recipes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from benchmarks.trainers.compare import is_equal_by_ratio
from samecurve.cli import commands
from samecurve.config import loader
from samecurve.config.schema import Dpo, Recipe
from samecurve.config.trainers import arguments, axolotl, files, llama_factory
from samecurve.config.trainers.translation import NoEqual, translate
from samecurve.optim.schedule import learning_rate
from samecurve.specs.environment import ROOT, train_script

TRL = """
model_name_or_path: base
dataset_name: rows.jsonl
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
num_train_epochs: 2
assistant_only_loss: true
use_peft: true
lora_r: 4
lora_target_modules: [q_proj, k_proj]
report_to: none
neftune_noise_alpha: 5
packin: true
"""
LLAMA_FACTORY = """
stage: sft
finetuning_type: lora
model_name_or_path: base
trust_remote_code: true
dataset: mine
dataset_dir: .
template: qwen
cutoff_len: 64
lora_rank: 8
lora_target: all
overwrite_cache: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 20
resume_from_checkpoint: null
deepspeed: ds.json
"""
AXOLOTL = """
base_model: base
datasets:
  - path: rows.jsonl
    type: chat_template
    field_messages: messages
val_set_size: 0.2
sequence_len: 64
sample_packing: true
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
wandb_project:
special_tokens:
  pad_token: "<pad>"
"""
SWIFT = """
nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model base \\
    --tuner_type lora \\
    --dataset 'rows.jsonl#20' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --learning_rate 1e-4 \\
    --max_length 64 \\
    --deepspeed zero2
"""


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    LlamaForCausalLM(config).save_pretrained("base")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    Path("dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.jsonl", "formatting": "sharegpt"}}))
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    return tmp_path


def adopted(text: str, name: str, capsys, *options: str) -> tuple[Recipe, str]:
    Path(name).write_text(text)
    code = commands.main(["adopt", "--config", name, "--output", "recipe.yaml", *options])
    printed = capsys.readouterr()
    assert code == 0, printed
    return loader.load_recipe("recipe.yaml"), printed.out


def test_of_trl(folder, capsys):
    recipe, printed = adopted(TRL, "sft.yaml", capsys, "--num_processes", "4")
    assert (recipe.task, recipe.epochs, recipe.precision, recipe.data.train_on) == ("sft", 2, "bf16", "assistant")
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size, recipe.batch.sequence_length) == (
        32,
        4,
        1024,
    )
    assert (recipe.adapter.rank, recipe.adapter.alpha, recipe.adapter.dropout) == (4, 32, 0.05)
    assert [*recipe.adapter.target_modules] == ["q_proj", "k_proj"]
    # what the file does not say is TRL's default, not the recipe's
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay) == ((0.9, 0.999), 0.0)
    assert (recipe.schedule.name, recipe.schedule.min_lr_ratio, recipe.data.packing) == ("linear", 0.0, False)
    assert recipe.memory.activation_checkpointing == "full"
    lines = [line for line in printed.splitlines() if line.startswith("NO EQUAL")]
    assert ["neftune_noise_alpha" in lines[0], "packin; " in lines[1], "packing is" in lines[1]] == [True] * 3
    assert "neftune_noise_alpha" in Path("recipe.yaml").read_text()
    assert f"python {train_script()} recipe.yaml --strategy ddp --num_processes 4" in printed


def test_a_prompt_of_trl_that_is_text_gets_no_template(folder, capsys):
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    recipe, _ = adopted(TRL, "sft.yaml", capsys)
    assert not recipe.data.chat and recipe.data.path == "rows.jsonl"


def test_text_of_trl_is_continued(folder, capsys):
    Path("rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    recipe, _ = adopted(TRL, "sft.yaml", capsys)
    assert recipe.task == "continue_pretrain" and not recipe.data.packing


def test_all_tokens_of_a_conversation_of_trl_are_trained(folder, capsys):
    """Without assistant_only_loss; of a prompt and a completion, those of the latter."""
    recipe, _ = adopted(f"trl sft {OF_TRL}", "a.sh", capsys)
    assert recipe.data.train_on == "all"
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    Path("recipe.yaml").unlink()
    assert adopted(f"trl sft {OF_TRL}", "a.sh", capsys)[0].data.train_on == "completion"


def test_rows_of_trl_that_are_never_cut(folder, capsys):
    """An explicit null is no default of TRL."""
    recipe, printed = adopted(TRL + "max_length: null\n", "sft.yaml", capsys)
    assert (
        "NO EQUAL, the training differs: max_length" in printed
        and "# max_length" not in Path("recipe.yaml").read_text()
    )
    Path("recipe.yaml").unlink()
    recipe, printed = adopted(TRL + "max_length: null\n", "b.yaml", capsys, "batch.sequence_length=2048")
    assert recipe.batch.sequence_length == 2048 and "max_length" not in printed


def test_most_rows_of_each_data_set_of_llama_factory(folder, capsys):
    Path("other.jsonl").write_text(Path("rows.jsonl").read_text())
    table = {"mine": {"file_name": "rows.jsonl"}, "other": {"file_name": "other.jsonl", "num_samples": 3}}
    Path("dataset_info.json").write_text(json.dumps(table))
    text = LLAMA_FACTORY.replace("dataset: mine", "dataset: mine,other\nmax_samples: 1000").replace("val_size: 0.1", "")
    recipe, printed = adopted(text, "a.yaml", capsys)
    assert recipe.data.max_samples is None and [part.max_samples for part in recipe.data.mixture] == [1000, 3]
    Path("recipe.yaml").unlink()
    recipe, _ = adopted(text.replace("mine,other", "mine"), "a.yaml", capsys)
    assert recipe.data.max_samples == 1000


def test_of_llama_factory(folder, capsys):
    recipe, printed = adopted(LLAMA_FACTORY, "llama3_lora_sft.yaml", capsys)
    assert recipe.data.path == "rows.jsonl" and recipe.data.validation_fraction == 0.1
    assert (recipe.adapter.rank, recipe.adapter.alpha, recipe.adapter.target_modules) == (8, 16, "all-linear")
    assert (recipe.batch.global_batch_size, recipe.batch.sequence_length) == (8, 64)
    assert (recipe.schedule.name, recipe.schedule.warmup_ratio, recipe.evaluate.every_steps) == ("cosine", 0.1, 20)
    assert not recipe.model.trust_remote_code  # a file that was downloaded does not decide that its code runs
    assert "a line break that it writes" in printed and "resume_from_checkpoint" in printed
    assert "--strategy ds.json" in printed and "NO EQUAL" not in printed


def test_values_of_the_command_line_are_in_the_recipe(folder, capsys):
    """Also one for a data set that the trainer's table would name, which is not here."""
    recipe, printed = adopted(LLAMA_FACTORY, "a.yaml", capsys, "optimizer.learning_rate=9e-6", "adapter.rank=3")
    assert (recipe.optimizer.learning_rate, recipe.adapter.rank) == (9e-6, 3)
    Path("recipe.yaml").unlink()
    elsewhere = LLAMA_FACTORY + "\ndataset_dir: elsewhere\n"
    recipe, printed = adopted(elsewhere, "b.yaml", capsys, "data.path=rows.jsonl")
    assert recipe.data.path == "rows.jsonl" and "NO EQUAL" not in printed
    assert commands.main(["adopt", "--config", "b.yaml", "--output", "c.yaml", "rank"]) == 2
    assert "found rank, expected key.path=value" in capsys.readouterr().err
    assert commands.main(["adopt", "--config", "b.yaml", "--output", "c.yaml"]) == 2
    assert f"there is no {Path.cwd() / 'elsewhere' / 'dataset_info.json'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "train_on", "packing", "said"),
    [
        ("stage: dpo", "completion", False, ""),  # with the line break behind an answer
        ("stage: dpo\npref_loss: ipo", "completion", False, "is the sigmoid loss"),
        ("stage: sft\ntrain_on_prompt: true", "all", False, "times tokens / (tokens + rows)"),
        ("stage: sft\nneat_packing: true", "assistant", True, ""),
        ("stage: sft\npacking: true", "assistant", True, "NO EQUAL, the training differs: packing"),
        ("stage: pt", "assistant", True, "NO EQUAL, the training differs: packing"),
        ("stage: pt\npacking: false", "assistant", False, "times tokens / (tokens + rows)"),
    ],
)
def test_what_llama_factory_trains(folder, capsys, keys, train_on, packing, said):
    Path("rows.jsonl").write_text(json.dumps(PAIR) + "\n")
    recipe, printed = adopted(keys + OF_FACTORY, "a.yaml", capsys)
    assert (recipe.data.train_on, recipe.data.packing) == (train_on, packing)
    assert said in printed and ("NO EQUAL" in printed) == ("NO EQUAL" in said)


def test_an_adapter_of_llama_factory_goes_on_as_it_is(folder, capsys):
    """Its defaults of a new adapter, all linear layers and rank 8, are not said of a trained one."""
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
    lora.base_model_name_or_path = "base"
    lora.save_pretrained("adapter")
    Path("adapter", "adapter_model.safetensors").touch()
    recipe, _ = adopted(f"{LLAMA_FACTORY}adapter_name_or_path: adapter\n", "a.yaml", capsys)
    assert recipe.adapter.path == "adapter"


def test_of_axolotl(folder, capsys):
    recipe, printed = adopted(AXOLOTL, "qlora.yml", capsys)
    assert (recipe.adapter.quantization, recipe.adapter.rank, recipe.optimizer.name) == ("4bit", 16, "adamw_8bit")
    assert (recipe.data.packing, recipe.data.validation_fraction, recipe.data.train_on) == (True, 0.2, "assistant")
    assert (recipe.evaluate.every_epochs, recipe.checkpoint.every_epochs, recipe.epochs) == (0.25, 1.0, 3)
    assert recipe.batch.global_batch_size == 8 and "NO EQUAL" not in printed


def test_alpaca_of_axolotl_is_text_without_a_template(folder, capsys):
    text = AXOLOTL.replace("type: chat_template\n    field_messages: messages", "type: alpaca")
    recipe, _ = adopted(text, "a.yaml", capsys)
    assert (recipe.data.format, recipe.data.chat) == ("alpaca-axolotl", False)
    entries = [{"path": "a", "type": "alpaca"}, {"path": "b", "type": "alpaca"}]
    both = axolotl.data_sets(entries, {})
    assert both["data.chat"] is False and [part["format"] for part in both["data.mixture"]] == ["alpaca-axolotl"] * 2
    assert isinstance(axolotl.data_sets([entries[0], {"path": "b", "type": "chat_template"}], {}), NoEqual)


def test_of_a_script_of_ms_swift(folder, capsys):
    recipe, printed = adopted(SWIFT, "train.sh", capsys)
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (32, 2)  # 2 rows, 8 times, 2 processes
    assert (recipe.data.path, recipe.data.max_samples) == ("rows.jsonl", 20)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.betas[1]) == (0.1, 0.95)
    assert "--strategy zero2 --num_processes 2" in printed


def test_defaults_of_ms_swift(folder, capsys):
    """Also by the name that tuner_type had before version 4; 3 rows are reached in ceil(16 / 3) micro-batches."""
    text = "swift sft --train_type lora --model base --dataset rows.jsonl --per_device_train_batch_size 3"
    recipe, printed = adopted(text, "a.sh", capsys)
    assert (recipe.adapter.rank, recipe.adapter.dropout, recipe.precision) == (8, 0.05, "bf16")
    assert (recipe.batch.global_batch_size, recipe.data.truncation) == (18, "drop")
    assert "NO EQUAL, the training differs: max_length" in printed


def test_processes_of_all_machines(folder, capsys):
    where = "--nnodes 2 --node_rank 0 --master_port 29500"
    text = f"torchrun {where} --nproc_per_node 8 sft.py {OF_TRL} --per_device_train_batch_size 2"
    recipe, printed = adopted(text, "a.sh", capsys)
    assert recipe.batch.global_batch_size == 32 and "NO EQUAL" not in printed
    Path("recipe.yaml").unlink()
    text = f"NNODES=2 NPROC_PER_NODE=4 swift sft {OF_SWIFT} --per_device_train_batch_size 2"
    assert adopted(text, "b.sh", capsys)[0].batch.global_batch_size == 16


def test_defaults_of_axolotl(folder, capsys):
    text = AXOLOTL.replace("sequence_len: ", "# ")
    for key in ("warmup_steps", "warmup_ratio"):
        text = text.replace(f"{key}: ", "# ")
    recipe, _ = adopted(text, "a.yaml", capsys)
    assert (recipe.batch.sequence_length, recipe.schedule.warmup_ratio, recipe.data.truncation) == (512, 0.03, "drop")
    Path("recipe.yaml").unlink()
    recipe, _ = adopted(f"{text}\nmax_steps: 200\n", "b.yaml", capsys)
    assert (recipe.steps, recipe.warmup_steps) == (200, 6)


def test_linear_layers_of_axolotl_that_are_off_are_those_that_are_named(folder, capsys):
    named = "lora_target_modules: [q_proj]\nlora_target_linear: false\n"
    text = "\n".join(line for line in AXOLOTL.splitlines() if not line.startswith("lora_target")) + f"\n{named}"
    assert adopted(text, "a.yaml", capsys)[0].adapter.target_modules == ("q_proj",)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"split": "train[:20%]"}, "datasets.split train[:20%]"),
        ({"split": "train[5000:]"}, "datasets.split train[5000:]"),
        ({"shards": 10}, "datasets.shards"),
        ({"roles_to_train": ["tool"]}, "datasets.roles_to_train"),
        ({"type": {"field_instruction": "a"}}, "datasets.type"),
        ({"split": "train[:20]", "ds_type": "json", "shards": None}, ""),
    ],
)
def test_what_axolotl_takes_of_a_data_set_is_told(entry, said):
    found = axolotl.data_sets([{"path": "a", **entry}], {})
    assert [name for name, value in found.items() if isinstance(value, NoEqual)] == [said] * bool(said)
    assert found["data.path"] == "a"


def test_a_part_of_a_value_without_an_equal_is_told():
    given = {"base_model": "x", "datasets": [{"path": "a", "split": "train[:20%]"}]}
    made = translate(axolotl.TRAINER, given)
    assert made.values["data.path"] == "a" and "datasets.split train[:20%]" in made.no_equal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optim": "adafactor"}, "optim adafactor"),
        ({"optim": "sgd"}, "optim sgd"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs.decay_type"),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"decay_type": "linear"}}, ""),
        ({"optim": "adamw_torch"}, ""),
    ],
)
def test_what_has_another_meaning_here_is_told(given, said):
    made = translate(files.TRAINERS["trl"], {"model_name_or_path": "x", **given})
    assert [*made.no_equal] == [said] * bool(said)


def test_the_rate_of_a_process_reward_model_is_trls():
    assert translate(files.TRAINERS["trl"], {"method": "prm"}).values["optimizer.learning_rate"] == 1e-5


PROMPTS = ("data.prompt_column", "data.completion_column")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "question", "chosen": "good", "rejected": "bad"}, {"data.prompt_column": "question"}),
        (
            {"prompt": "input", "response": "output"},
            {"data.prompt_column": "input", "data.completion_column": "output"},
        ),
        ({"prompt": "instruction", "response": "output"}, {}),
        ({"prompt": "content"}, {"data.text_column": "content"}),
    ],
)
def test_renamed_columns_of_llama_factory(columns, expected):
    found = llama_factory.source({"file_name": "a.json", "columns": columns}, Path())
    assert {key: value for key, value in found.items() if key in ("data.text_column", *PROMPTS)} == expected


KTO = {"loss": "kto", "desirable_weight": 1.5}
SIMPO = {"loss": "simpo", "gamma": 1.0, "beta": 2.0}  # ms-swift's defaults
OF_TRL = "--model_name_or_path base --dataset_name rows.jsonl"
OF_SWIFT = "--model base --dataset rows.jsonl --max_length 64"
OF_FACTORY = "\nmodel_name_or_path: base\ndataset: mine\ndataset_dir: .\ntemplate: qwen"
OF_AXOLOTL = "\nbase_model: base\nsequence_len: 64\ndatasets: [{path: rows.jsonl, type: chat_template}]"


@pytest.mark.parametrize(
    ("name", "text", "dpo"),
    [
        ("a.sh", f"trl orpo --beta 0.2 {OF_TRL}", {"loss": "orpo", "beta": 0.2}),
        ("a.sh", f"trl cpo --loss_type simpo --cpo_alpha 0 {OF_TRL}", {"loss": "simpo", "gamma": 0.5}),
        ("a.sh", f"trl dpo --loss_type ipo {OF_TRL}", {"loss": "ipo"}),
        ("a.sh", f"trl kto --desirable_weight 1.5 {OF_TRL}", KTO),
        ("a.sh", f"swift rlhf --rlhf_type kto --desirable_weight 1.5 {OF_SWIFT}", KTO),
        (
            "a.sh",
            f"swift rlhf --rlhf_type simpo --cpo_alpha 0 {OF_SWIFT}",
            {"loss": "simpo", "gamma": 1.0, "beta": 2.0},
        ),
        ("a.yaml", f"stage: kto\nkto_chosen_weight: 1.5{OF_FACTORY}", KTO),
        ("a.yaml", f"stage: dpo\npref_loss: simpo{OF_FACTORY}", {"loss": "simpo", "gamma": 0.5}),
        ("a.yaml", f"rl: kto\nkto_desirable_weight: 1.5{OF_AXOLOTL}", KTO),
    ],
)
def test_preference_losses(folder, capsys, name, text, dpo):
    """Of a method that is another loss of the task dpo here, such as orpo, the loss is translated, too."""
    answer = {"prompt": "a", "completion": "b", "label": True}
    Path("rows.jsonl").write_text(json.dumps(answer if dpo is KTO else PAIR) + "\n")
    recipe, printed = adopted(text, name, capsys)
    assert recipe.dpo.model_dump() == {**Dpo().model_dump(), **dpo} and "NO EQUAL" not in printed


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "stage: ppo\nmodel_name_or_path: x\ndataset: y", "stage: found ppo"),
        ("a.yaml", "model_name_or_path: x\ntemplate: qwen\nexport_dir: y", "dataset: missing"),
        ("grpo.yaml", "model_name_or_path: x\ndataset_name: y", "trl grpo has no task here"),
        ("a.yaml", "a: 1", "no key of TRL, LLaMA-Factory, axolotl or ms-swift"),
        ("a.yaml", "- 1", "found no keys"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.sh", "echo 1", "has no command of trl"),
        ("a.sh", "swift rlhf --rlhf_type grpo --model x", "rlhf_type: found grpo"),
        ("a.sh", "trl cpo --model_name_or_path x --dataset_name rows.jsonl", "trl cpo: its own loss"),
        ("a.sh", "llamafactory-cli train b.yaml", "its command reads b.yaml, which is not here"),
        ("a.yaml", "base_model: x\nsequence_len: many", "sequence_len: found many"),
    ],
)
def test_mistakes(folder, capsys, name, text, said):
    Path(name).write_text(text)
    assert commands.main(["adopt", "--config", name, "--output", "recipe.yaml"]) == 2
    assert said in capsys.readouterr().err and not Path("recipe.yaml").exists()


def test_nothing_is_overwritten(folder, capsys):
    Path("sft.yaml").write_text(TRL)
    assert commands.main(["adopt", "--config", "sft.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err and Path("sft.yaml").read_text() == TRL


def test_every_argument_of_the_installed_transformers_is_known():
    assert {field.name for field in dataclasses.fields(TrainingArguments)} - arguments.RULES.keys() == set()


def test_what_is_named_in_the_tables_is_a_key_of_recipes():
    reference = (ROOT / "docs" / "recipe_reference.md").read_text()
    named = {rule for trainer in files.TRAINERS.values() for rule in trainer.rules.values() if isinstance(rule, str)}
    assert len(named) > 10 and [key for key in named if f"| `{key}` |" not in reference] == []


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_the_default_optimizer_and_schedule_are_those_of_transformers(folder, scheduler):
    """Of a training with its defaults: rates, and what AdamW is made with."""
    given = {"lr_scheduler_type": scheduler, "warmup_steps": 2, "max_steps": 7, "model_name_or_path": "base"}
    made = translate(files.TRAINERS["trl"], given | {"method": "sft", "learning_rate": 1e-3}).values
    set_seed(0)
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained("base"),
        args=TrainingArguments(
            output_dir="x", use_cpu=True, learning_rate=1e-3, max_steps=7, warmup_steps=2, lr_scheduler_type=scheduler
        ),
    )
    trainer.create_optimizer_and_scheduler(7)
    group = trainer.optimizer.param_groups[0]
    assert (made["optimizer.betas"], made["optimizer.weight_decay"]) == ([*group["betas"]], group["weight_decay"])
    text = {"steps": 7, "output_dir": "x", "model": {"path": "base"}, "data": {"path": "rows.jsonl", "packing": False}}
    text["schedule"] = {key.partition(".")[2]: value for key, value in made.items() if key.startswith("schedule.")}
    text["optimizer"] = {"learning_rate": made["optimizer.learning_rate"]}
    Path("schedule.yaml").write_text(yaml.safe_dump(text | {"task": "sft"}))
    recipe = loader.load_recipe("schedule.yaml")
    for step in range(1, 8):
        assert learning_rate(recipe, step) == pytest.approx(trainer.lr_scheduler.get_last_lr()[0], abs=1e-12)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()


def test_a_key_without_an_equal_that_is_off_has_no_effect():
    rules = arguments.RULES
    assert isinstance(rules["neftune_noise_alpha"], NoEqual)
    made = translate(files.TRAINERS["trl"], {"neftune_noise_alpha": None, "label_smoothing_factor": 0.0})
    assert not made.no_equal and {*made.no_effect} == {"neftune_noise_alpha", "label_smoothing_factor"}


@pytest.mark.parametrize(
    ("verdict", "note", "counts"),
    [
        ("equal", "x 950/942", True),
        ("equal", "marks; x 950/942", True),
        ("differs", "x 950/942", False),
        ("equal", "adopt: no equal of max x y", False),
        ("equal", "", False),
    ],
)
def test_rows_that_are_equal_times_a_ratio(verdict, note, counts):
    assert is_equal_by_ratio(["name", "6.0", "1.0", "6.1", "1.1", verdict, "1e-07", note]) is counts
