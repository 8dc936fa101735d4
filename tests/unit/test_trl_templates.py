"""Chats in three templates against TRL: tokens, losses, gradients of its DPO, KTO, CPO (SimPO), reward, SFT trainers.

TRL is no dependency of this repository: scripts/test.sh --full installs it into a folder of its own, which
SAMECURVE_TRL names, and it runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import END_OF_TURN, FAMILIES, make_tokenizer, save_models
from test_trl_preferences import check, found
from tiny_recipes import jsonl, make_recipe
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from samecurve.tasks import registry

pytestmark = pytest.mark.full
TRL = os.environ.get("SAMECURVE_TRL", "")
NUM_PAIRS = 6
EXTRA = 3  # so many tokens of the answers to the longest prompt are kept where pairs are cut
PROGRAM = """
import json, sys
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl import chat_template_utils
from trl.data_utils import maybe_apply_chat_template
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

folder, name, end_of_turn, extra = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
common = dict(output_dir=folder, max_length=None, report_to=[], use_cpu=True, bf16=False)
found = {"losses": {}}


def read(file):
    return [json.loads(line) for line in open(f"{folder}/{file}.jsonl")]


def causal(name):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)


def keep(name, model, loss):
    squares = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    found["losses"][name] = [loss.item(), squares.sqrt().item()]
    model.zero_grad()


def ended(inputs):
    # up to the first end of turn in the completion
    mask = inputs["completion_mask"].clone()
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        start = mask[row].tolist().index(1)
        mask[row, ids.index(tokenizer.convert_tokens_to_ids(end_of_turn), start) + 1 :] = 0
    return inputs | {"completion_mask": mask}


def dpo(file, **options):
    settings = DPOConfig(beta=0.3, **common, **options)
    return DPOTrainer(causal("policy"), causal("reference"), settings, train_dataset=Dataset.from_list(read(file)),
                      processing_class=tokenizer)


def tokens(inputs):
    columns = (inputs[key].tolist() for key in ("input_ids", "completion_mask", "attention_mask"))
    sequences = [
        [[token, mark] for token, mark, real in zip(*row, strict=True) if real]
        for row in zip(*columns, strict=True)
    ]
    half = len(sequences) // 2
    return [list(pair) for pair in zip(sequences[:half], sequences[half:], strict=True)]


for loss_type in ("sigmoid", "ipo"):
    trainer = dpo("rows", loss_type=[loss_type])
    examples = list(trainer.train_dataset)
    inputs = trainer.data_collator(examples)
    batches = {"completion": inputs, "assistant": ended(inputs)}
    for train_on, batch in batches.items():
        loss = trainer._compute_loss(trainer.model, batch, False)
        loss.backward()
        keep(f"{loss_type} {train_on}", trainer.model, loss)
found["tokens"] = {train_on: tokens(batch) for train_on, batch in batches.items()}
longest = max(len(row["prompt_ids"]) for row in examples)
found["cut"] = [longest + extra, tokens(DataCollatorForPreference(tokenizer.pad_token_id, longest + extra)(examples))]
trainer = dpo("odd")
found["odd"] = tokens(trainer.data_collator(list(trainer.train_dataset)))

answers = [{"prompt": row["prompt"], "completion": row[which], "label": which == "chosen"}
           for row in read("rows") for which in ("chosen", "rejected")]
settings = KTOConfig(beta=0.3, per_device_train_batch_size=len(answers), train_sampling_strategy="sequential", **common)
trainer = KTOTrainer(causal("policy"), causal("reference"), settings, train_dataset=Dataset.from_list(answers),
                     processing_class=tokenizer)
whole = trainer.data_collator(list(trainer.train_dataset))
wrong = {f"KL_{key}": value for key, value in ended({
    key: whole[f"KL_{key}"] for key in ("input_ids", "attention_mask", "completion_mask")}).items()}
for train_on, batch in ("completion", whole), ("assistant", ended(whole) | wrong):
    loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()
    keep(f"kto {train_on}", trainer.model, loss)


def bare(kind, **values):
    trainer = object.__new__(kind)
    trainer.__dict__.update(accelerator=Accelerator(cpu=True), is_encoder_decoder=False, aux_loss_enabled=False,
                            padding_value=0, pad_token_id=0, label_smoothing=0.0, alpha=0.0, cpo_alpha=0.0,
                            processing_class=tokenizer, max_length=512, **values)
    return trainer


for train_on, inputs in batches.items():
    batch, model = {}, causal("policy")
    for index, which in enumerate(("chosen", "rejected")):
        ids, mask, answer = (inputs[k].chunk(2)[index] for k in ("input_ids", "attention_mask", "completion_mask"))
        batch |= {f"{which}_input_ids": ids, f"{which}_attention_mask": mask,
                  f"{which}_labels": ids.masked_fill(answer == 0, -100)}
    loss = bare(CPOTrainer, beta=2.0, simpo_gamma=0.7, loss_type="simpo").get_batch_loss_metrics(model, batch)[0]
    loss.backward()
    keep(f"simpo {train_on}", model, loss)
found["orpo"] = []
for row in read("rows"):
    made = bare(ORPOTrainer).tokenize_row(maybe_apply_chat_template(row, tokenizer))
    found["orpo"].append([[made[f"{which}_input_ids"], made[f"{which}_labels"]] for which in ("chosen", "rejected")])

model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/scores", dtype=torch.float32)
trainer = RewardTrainer(model, RewardConfig(**common), train_dataset=Dataset.from_list(read("rows")),
                        processing_class=tokenizer)
scored = list(trainer.train_dataset)
loss = trainer.compute_loss(trainer.model, trainer.data_collator(scored))
loss.backward()
keep("reward", trainer.model, loss)
found["scored"] = [[row["chosen_ids"], row["rejected_ids"]] for row in scored]


def sft(title, rows, **options):
    trainer = SFTTrainer(causal("policy"), SFTConfig(**common, **options), train_dataset=Dataset.from_list(rows),
                         processing_class=tokenizer)
    examples = list(trainer.train_dataset)
    found[title] = [[row["input_ids"], row["labels"]] for row in examples]
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    loss.backward()
    keep(title, trainer.model, loss)


completions = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in read("rows")]
sft("sft completion", completions)
training = {"chatml": "qwen2_5", "llama3": "llama3", "gemma": "gemma"}[name]
tokenizer.chat_template = getattr(chat_template_utils, f"{training}_training_chat_template")
tokenizer.save_pretrained(f"{folder}/marked")
sft("sft assistant", completions, assistant_only_loss=True, completion_only_loss=False)
json.dump(found, open(f"{folder}/found.json", "w"))
"""


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows() -> list[dict]:
    return [
        {
            "prompt": [message("user", f"what is {n}?")],
            "chosen": [message("assistant", "yes. " * (1 + n % 3) + str(n))],
            "rejected": [message("assistant", f"n{'o' * n}")],
        }
        for n in range(NUM_PAIRS)
    ]


def odd_rows() -> list[dict]:
    """Answers of several turns; one of two whose first line break is one token with the prompt's, in ChatML."""
    asked = [message("user", "a")]
    several = [message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    return [
        {"prompt": asked, "chosen": several, "rejected": [message("assistant", "e")]},
        {"prompt": asked, "chosen": [message("assistant", "\nb")], "rejected": [message("assistant", "c")]},
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, Path]:
    """A family's name; a folder with a tokenizer, models, rows, and what TRL makes of them (found.json)."""
    if not Path(TRL, "trl").is_dir():
        pytest.skip("SAMECURVE_TRL names no folder that trl is installed in")
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    jsonl(folder / "rows.jsonl", *rows())
    jsonl(folder / "odd.jsonl", *odd_rows())
    jsonl(folder / "completions.jsonl", *({"prompt": row["prompt"], "completion": row["chosen"]} for row in rows()))
    tokenizer = make_tokenizer(name)
    tokenizer.save_pretrained(folder)
    save_models(folder, tokenizer)
    environment = {**os.environ, "PYTHONPATH": TRL, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder), name, END_OF_TURN[name], str(EXTRA)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return name, folder


def load(folder: Path, file: str = "rows", task: str = "dpo", length: int = 512, marked: bool = False, **sections):
    recipe = make_recipe(
        folder,
        folder / f"{file}.jsonl",
        data={"packing": False, **sections.pop("data", {})},
        tokenizer={"path": str(folder / "marked" if marked else folder), "vocabulary_size": None},
        batch={"global_batch_size": 1, "sequence_length": length},
        **sections,
    )
    return registry.load_task(recipe.model_copy(update={"task": task}))


def check_tokens(task, expected: list[list[list[list[int]]]]) -> None:
    """expected: of each pair's answers, [token, whether it is trained] of each token."""
    arrays = task.train[np.arange(len(task.train))]
    assert len(expected) == len(task.train)
    for row, which in np.ndindex(len(expected), 2):
        tokens, marks = zip(*expected[row][which], strict=True)
        size = len(tokens) - 1
        assert arrays.inputs["input_ids"][row, which, :size].tolist() == [*tokens[:-1]]
        targets = [token if mark else -100 for token, mark in zip(tokens[1:], marks[1:], strict=True)]
        assert arrays.labels[row, which].tolist() == targets + [-100] * (len(arrays.labels[row, which]) - size)


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_tokens_and_what_is_trained_of_them(family, train_on):
    """ "completion" as TRL has them, "assistant" to the end of the turn, which in Llama 3's template is the same."""
    name, folder = family
    expected = found(folder)["tokens"]
    check_tokens(load(folder, data={"train_on": train_on}), expected[train_on])
    assert (expected["assistant"] == expected["completion"]) is (name == "llama3")


def test_odd_answers(family):
    _, folder = family
    check_tokens(load(folder, "odd", data={"train_on": "completion"}), found(folder)["odd"])


def test_cut_answers(family):
    """A row reads one token less than TRL's max_length: the last one is a target only."""
    _, folder = family
    max_length, expected = found(folder)["cut"]
    task = load(folder, length=max_length - 1, data={"train_on": "completion"})
    assert task.train.num_truncated > 0
    check_tokens(task, expected)


LOSSES = {
    "sigmoid": {"beta": 0.3},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "kto": {"loss": "kto", "beta": 0.3},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.7},
}


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_of_pairs(name, train_on, family):
    _, folder = family
    task = load(folder, data={"train_on": train_on}, dpo=LOSSES[name])
    inputs, targets = batch(task)
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    if task.settings.has_reference:
        reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
        with torch.no_grad():
            targets["reference"] = task.features(reference(**inputs).logits, **targets)
            if name == "kto":
                targets |= task.context(task.features(policy(**inputs).logits, **targets))
    check(folder, f"{name} {train_on}", policy, task.loss(policy(**inputs).logits, **targets) / task.count(**targets))


def test_orpo_and_simpo_of_trl_add_an_end_of_text(family):
    """Behind what the template wrote, unless that ends with it. Not done here: a template can write {{ eos_token }}."""
    name, folder = family
    end = make_tokenizer(name).eos_token_id
    for theirs, ours in zip(found(folder)["orpo"], found(folder)["tokens"]["completion"], strict=True):
        for (ids, labels), pairs in zip(theirs, ours, strict=True):
            tokens = [token for token, _ in pairs]
            assert ids == tokens + ([end] if tokens[-1] != end else [])
            assert labels == [token if mark else -100 for token, mark in pairs] + [end] * (len(ids) - len(tokens))
    assert (len(ids) == len(tokens)) is (name == "llama3")


def test_reward_tokens_loss_and_gradient(family):
    _, folder = family
    task = load(folder, task="reward")
    inputs, targets = batch(task)
    kept = [ids[mark == 1].tolist() for ids, mark in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    assert kept == [ids for both in found(folder)["scored"] for ids in both]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scores", dtype=torch.float32)
    check(folder, "reward", model, task.loss(model(**inputs).logits, **targets) / NUM_PAIRS)


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_sft_tokens_loss_and_gradient(train_on, family):
    """assistant: with assistant_only_loss, by the marks of TRL's training template. completion: TRL's default."""
    _, folder = family
    marked = train_on == "assistant"
    task = load(folder, "completions", "sft", marked=marked, data={"train_on": train_on})
    arrays = task.train[np.arange(NUM_PAIRS)]
    for row, (ids, labels) in enumerate(found(folder)[f"sft {train_on}"]):
        assert arrays.inputs["input_ids"][row, : len(ids) - 1].tolist() == ids[:-1]
        assert arrays.labels[row, : len(ids) - 1].tolist() == labels[1:]
    inputs, targets = (
        {key: torch.from_numpy(value) for key, value in part.items()} for part in (arrays.inputs, arrays.targets)
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    model.config.use_cache = False
    loss = task.loss(task.outputs(model(**inputs)), **targets) / task.count(**targets)
    check(folder, f"sft {train_on}", model, loss)


def batch(task) -> tuple[dict, dict]:
    arrays = task.train[np.arange(len(task.train))]
    inputs = {key: torch.from_numpy(value).flatten(0, 1) for key, value in arrays.inputs.items()}
    targets = {key: torch.from_numpy(value) for key, value in arrays.targets.items()}
    labels = targets["labels"]
    return inputs, targets | {"labels": labels.flatten(0, 1) if labels.dim() > 1 else labels}
