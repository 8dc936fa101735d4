"""Tokens, labels, loss and gradient against those of TRL's SFTTrainer.

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
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.data import chat_encoder
from samecurve.data.find import find_conversations
from samecurve.data.schemas import conversation
from samecurve.tasks import registry

pytestmark = pytest.mark.full
TRL = os.environ.get("SAMECURVE_TRL", "")
LENGTH = 512  # no row is cut: TRL's are not
PROGRAM = """
import json, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

folder, options = sys.argv[1], json.loads(sys.argv[2])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
rows = Dataset.from_list([json.loads(line) for line in open(f"{folder}/rows.jsonl")])
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
settings = SFTConfig(output_dir=folder, max_length=None, report_to=[], use_cpu=True, bf16=False, **options)
trainer = SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)
examples = list(trainer.train_dataset)
loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
loss.backward()
norm = sum(p.grad.square().sum() for p in trainer.model.parameters() if p.grad is not None).sqrt()
found = {"tokens": [[row["input_ids"], row["labels"]] for row in examples], "loss": loss.item(), "norm": norm.item()}
json.dump(found, open(f"{folder}/found.json", "w"))
"""


def rows(kind: str) -> list[dict]:
    draw = random.Random(2)

    def say() -> str:
        return "".join(draw.choices("ab cd\n é🙂", k=draw.randint(1, 20))) + draw.choice("xyz")

    def turns(*roles: str) -> list[dict]:
        return [{"role": role, "content": say()} for role in roles]

    exchange = ("user", "assistant")
    make = {
        "messages": lambda: {"messages": turns("system", *exchange * draw.randint(1, 3))},
        "prompt": lambda: {"prompt": turns("user"), "completion": turns("assistant")},
        "text": lambda: {"prompt": say(), "completion": say()},
    }[kind]
    return [make() for _ in range(40)]


@pytest.mark.skipif(not Path(TRL, "trl").is_dir(), reason="SAMECURVE_TRL names no folder that trl is installed in")
@pytest.mark.parametrize("kind", ["messages", "prompt", "text"])
def test_tokens_labels_and_loss_are_those_of_trl(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(kind)))
    tokenizer = load(tmp_path, path).tokenizer
    tokenizer.save_pretrained(tmp_path)
    save_model(tmp_path / "model", len(tokenizer))
    schema = conversation.ChatSchema(chat=kind != "text")
    encoded = chat_encoder.encoder(tokenizer, schema).encode(
        list(find_conversations(str(path), None, schema).documents())
    )
    # without it TRL trains a completion's line break behind the end of the turn, too
    options = json.dumps({"assistant_only_loss": kind != "text"})
    environment = {**os.environ, "PYTHONPATH": TRL, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), options]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["tokens"]) == len(encoded) == 40
    for ours, (ids, labels) in zip(encoded, found["tokens"], strict=True):
        tokens = list(ours.tokens)
        assert tokens == ids
        assert [token if mark else -100 for token, mark in zip(tokens, ours.trained, strict=True)] == labels
    for packing in (False, True):
        task = load(tmp_path, path, packing=packing, chat=schema.chat)
        assert (len(task.train) == 40) is not packing
        check_loss(task, tmp_path, found["loss"], found["norm"])


def check_loss(task, folder: Path, loss: float, norm: float) -> None:
    """All rows as one batch."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.config.use_cache = False  # as in training: with a cache, packed rows are not kept apart
    arrays = task.train[np.arange(len(task.train))]
    inputs, targets = (
        {key: torch.from_numpy(array) for key, array in part.items()} for part in (arrays.inputs, arrays.targets)
    )
    ours = task.loss(task.outputs(model(**inputs)), **targets) / task.count(**targets)
    ours.backward()
    assert ours.item() == pytest.approx(loss, rel=1e-5)
    squares = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    assert squares.sqrt().item() == pytest.approx(norm, rel=1e-5)


def load(folder: Path, path: Path, **data):
    recipe = make_recipe(
        folder,
        path,
        data=data,
        tokenizer={"vocabulary_size": 300},
        batch={"global_batch_size": 1, "sequence_length": LENGTH},
    )
    return registry.load_task(recipe)


def save_model(folder: Path, vocabulary_size: int) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=vocabulary_size, initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
