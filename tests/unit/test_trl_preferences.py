"""Tokens and losses of preference pairs against those of TRL's DPO, KTO, ORPO, CPO (SimPO) and reward trainers.

TRL is no dependency of this repository: scripts/test.sh --full installs it into a folder of its own, which
SAMECURVE_TRL names, and it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_recipes import make_recipe
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from samecurve.losses.chunked_cross_entropy import trained_positions
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.losses.token_log_probabilities import LabelLogProbabilities, chunked_log_probabilities
from samecurve.tasks import registry

pytestmark = pytest.mark.full
TRL = os.environ.get("SAMECURVE_TRL", "")
NUM_PAIRS = 6
PROGRAM = """
import json, sys
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

folder = sys.argv[1]
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
rows = [json.loads(line) for line in open(f"{folder}/rows.jsonl")]
common = dict(output_dir=folder, max_length=None, report_to=[], use_cpu=True, bf16=False)
found = {"losses": {}}


def causal(name):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)


def keep(name, model, loss):
    model.zero_grad()
    loss.backward()
    squares = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    found["losses"][name] = [loss.item(), squares.sqrt().item()]


def dpo(name, **options):
    settings = DPOConfig(beta=0.3, **common, **options)
    trainer = DPOTrainer(causal("policy"), causal("reference"), settings, train_dataset=Dataset.from_list(rows),
                         processing_class=tokenizer)
    examples = list(trainer.train_dataset)
    inputs = trainer.data_collator(examples)
    keep(name, trainer.model, trainer._compute_loss(trainer.model, inputs, False))
    return examples, inputs


examples, inputs = dpo("sigmoid", loss_type=["sigmoid"])
dpo("ipo", loss_type=["ipo"])
found["tokens"] = [[[row["prompt_ids"], row[f"{which}_ids"]] for which in ("chosen", "rejected")] for row in examples]

unpaired = [json.loads(line) for line in open(f"{folder}/unpaired.jsonl")]
answers = [{"prompt": row["prompt"], "completion": row[which], "label": which == "chosen"}
           for row in rows for which in ("chosen", "rejected")]
for name, examples in ("kto", unpaired), ("kto of pairs", answers):
    settings = KTOConfig(beta=0.3, desirable_weight=1.25, undesirable_weight=0.5, **common,
                         per_device_train_batch_size=len(examples), train_sampling_strategy="sequential")
    trainer = KTOTrainer(causal("policy"), causal("reference"), settings, train_dataset=Dataset.from_list(examples),
                         processing_class=tokenizer)
    batch = trainer.data_collator(list(trainer.train_dataset))
    keep(name, trainer.model, trainer._compute_loss(trainer.model, batch, False))


def bare(kind, **values):
    trainer = object.__new__(kind)
    trainer.__dict__.update(accelerator=Accelerator(cpu=True), is_encoder_decoder=False, aux_loss_enabled=False,
                            padding_value=0, pad_token_id=0, label_smoothing=0.0, alpha=0.0, cpo_alpha=0.0, **values)
    return trainer


def batch_of(inputs):
    made = {}
    for index, which in enumerate(("chosen", "rejected")):
        ids, mask, answer = (inputs[k].chunk(2)[index] for k in ("input_ids", "attention_mask", "completion_mask"))
        made |= {f"{which}_input_ids": ids, f"{which}_attention_mask": mask,
                 f"{which}_labels": ids.masked_fill(answer == 0, -100)}
    return made


unprompted = {key: torch.tensor(value) for key, value in json.load(open(f"{folder}/unprompted.json")).items()}
trainer, model, total = bare(ORPOTrainer, beta=0.3), causal("policy"), 0.0
for pair in range(len(rows)):  # of a batch of one pair, TRL's mean over the batch's tokens is that over the pair's
    one = {key: value.view(2, len(rows), -1)[:, pair] for key, value in unprompted.items()}
    total = total + trainer.get_batch_loss_metrics(model, batch_of(one))[0] / len(rows)
keep("orpo", model, total)
for name, kind, batch, values in (
    ("simpo", CPOTrainer, inputs, dict(beta=2.0, simpo_gamma=0.7, loss_type="simpo")),
    ("smoothed", CPOTrainer, inputs, dict(beta=0.3, loss_type="sigmoid") | {"label_smoothing": 0.1}),
):
    smoothing = values.pop("label_smoothing", 0.0)
    trainer, model = bare(kind, **values), causal("policy")
    trainer.label_smoothing = smoothing
    keep(name, model, trainer.get_batch_loss_metrics(model, batch_of(batch))[0])

for name, coefficient in (("reward", None), ("centred", 0.05)):
    model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/scores", dtype=torch.float32)
    settings = RewardConfig(center_rewards_coefficient=coefficient, **common)
    trainer = RewardTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    scored = list(trainer.train_dataset)
    keep(name, trainer.model, trainer.compute_loss(trainer.model, trainer.data_collator(scored)))
found["scored"] = [[row["chosen_ids"], row["rejected_ids"]] for row in scored]
json.dump(found, open(f"{folder}/found.json", "w"))
"""


def rows() -> list[dict]:
    draw = random.Random(2)

    def say() -> str:
        return " " + " ".join("".join(draw.choices("abcd", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 9)))

    return [{"prompt": f"{say().strip()}?", "chosen": say(), "rejected": say()} for _ in range(NUM_PAIRS)]


def unpaired() -> list[dict]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": nth % 3 > 0} for nth, row in enumerate(rows())
    ]


def unprompted(vocabulary_size: int) -> dict[str, list]:
    """Answers of different lengths to an empty prompt: TRL's ORPO trains the tokens of prompts, too."""
    draw = random.Random(3)
    lengths = [draw.randint(3, 9) for _ in range(2 * NUM_PAIRS)]
    ids = [[0, *draw.choices(range(4, vocabulary_size), k=length), *[0] * (9 - length)] for length in lengths]
    masks = [[1] * (1 + length) + [0] * (9 - length) for length in lengths]
    return {"input_ids": ids, "attention_mask": masks, "completion_mask": [[0] + line[1:] for line in masks]}


def load(folder: Path, task: str = "dpo", file: str = "rows", **settings):
    recipe = make_recipe(
        folder,
        folder / f"{file}.jsonl",
        data={"chat": False, "packing": False},
        tokenizer={"vocabulary_size": 300} if file == "rows" else {"path": str(folder), "vocabulary_size": None},
        **({task: settings} if settings else {}),
    )
    return registry.load_task(recipe.model_copy(update={"task": task}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The rows, a policy, a reference and a scoring model, and what TRL makes of them (found.json)."""
    if not Path(TRL, "trl").is_dir():
        pytest.skip("SAMECURVE_TRL names no folder that trl is installed in")
    folder = tmp_path_factory.mktemp("trl")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (folder / "unpaired.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unpaired()))
    tokenizer = load(folder).tokenizer
    tokenizer.save_pretrained(folder)
    (folder / "unprompted.json").write_text(json.dumps(unprompted(len(tokenizer))))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), initializer_range=0.3, **sizes)
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scores")
    environment = {**os.environ, "PYTHONPATH": TRL, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def found(folder: Path) -> dict:
    return json.loads((folder / "found.json").read_text())


def test_tokens_and_what_is_trained_of_them(folder):
    task = load(folder)
    arrays = task.train[np.arange(NUM_PAIRS)]
    for index, both in enumerate(found(folder)["tokens"]):
        for which, (prompt, answer) in enumerate(both):
            ids, labels = arrays.inputs["input_ids"][index, which], arrays.labels[index, which]
            size = len(prompt) + len(answer) - 1
            assert ids[:size].tolist() == [*prompt, *answer][:-1]
            assert labels[labels != -100].tolist() == answer
            assert (labels[: len(prompt) - 1] == -100).all()
    scored = load(folder, "reward").train[np.arange(NUM_PAIRS)].inputs
    for index, both in enumerate(found(folder)["scored"]):
        for which, ids in enumerate(both):
            kept = scored["attention_mask"][index, which] == 1
            assert scored["input_ids"][index, which][kept].tolist() == ids


KTO = {"loss": "kto", "beta": 0.3, "desirable_weight": 1.25, "undesirable_weight": 0.5}
CASES = {
    "sigmoid": {"beta": 0.3},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "kto": KTO | {"file": "unpaired"},
    "kto of pairs": KTO,
    "orpo": {"loss": "orpo", "beta": 0.3},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.7},
}


@pytest.mark.parametrize("chunked", [False, True], ids=["whole logits", "chunks"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_on_the_same_batch(name, chunked, folder):
    task = load(folder, **CASES[name])
    inputs, targets = batch(task, folder if name == "orpo" else None)
    labels = targets["labels"]

    def outputs(model) -> torch.Tensor:
        """What the task's loss takes: logits, or the labels' log-probabilities computed in chunks."""
        if not chunked:
            return model(**inputs).logits
        hidden, head = model.model(**inputs).last_hidden_state, model.lm_head
        return chunked_log_probabilities(hidden, head, LabelLogProbabilities(labels, trained_positions(labels)))

    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    if task.settings.has_reference:
        reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
        with torch.no_grad():
            targets["reference"] = task.features(outputs(reference), **targets)
        if name == "smoothed":  # CPO knows no reference
            targets["reference"] = torch.zeros_like(targets["reference"])
        if task.settings.loss == "kto":
            with torch.no_grad():
                targets |= task.context(task.features(outputs(policy), **targets))
    check(folder, name, policy, task.loss(outputs(policy), **targets) / task.count(**targets))


@pytest.mark.parametrize(("name", "settings"), [("reward", {}), ("centred", {"center_rewards_coefficient": 0.05})])
def test_reward_loss_and_gradient_on_the_same_batch(name, settings, folder):
    task = load(folder, "reward", **settings)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scores", dtype=torch.float32)
    arrays = task.train[np.arange(NUM_PAIRS)]
    inputs = {key: torch.from_numpy(value).flatten(0, 1) for key, value in arrays.inputs.items()}
    check(folder, name, model, task.loss(model(**inputs).logits, torch.from_numpy(arrays.labels)) / NUM_PAIRS)


def batch(task, unprompted: Path | None) -> tuple[dict, dict]:
    if unprompted is None:
        arrays = task.train[np.arange(len(task.train))]
        flat = {key: torch.from_numpy(value).flatten(0, 1) for key, value in arrays.inputs.items()}
        targets = {key: torch.from_numpy(value) for key, value in arrays.targets.items()}
        return flat, targets | {"labels": targets["labels"].flatten(0, 1)}
    values = json.loads((unprompted / "unprompted.json").read_text())
    # TRL has all chosen ones first
    ids, masks = (
        torch.tensor(values[key]).view(2, NUM_PAIRS, -1).transpose(0, 1).flatten(0, 1)
        for key in ("input_ids", "completion_mask")
    )
    return {"input_ids": ids[:, :-1]}, {"labels": ids.masked_fill(masks == 0, IGNORE_INDEX)[:, 1:].contiguous()}


def check(folder: Path, name: str, model, loss) -> None:
    loss.backward()
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    expected_loss, expected_norm = found(folder)["losses"][name]
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert norm.item() == pytest.approx(expected_norm, rel=1e-5)
