"""Tokens and labels against those of TRL's SFTTrainer.

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

import pytest
from test_conversations import make_recipe
from transformers import PreTrainedTokenizerFast

from samecurve import chat, conversations, tasks

pytestmark = pytest.mark.full
TRL = os.environ.get("SAMECURVE_TRL", "")
PROGRAM = """
import json, sys
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

folder, options = sys.argv[1], json.loads(sys.argv[2])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
rows = Dataset.from_list([json.loads(line) for line in open(f"{folder}/rows.jsonl")])
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=len(tokenizer), **sizes))
settings = SFTConfig(output_dir=folder, max_length=None, report_to=[], use_cpu=True, bf16=False, **options)
trainer = SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)
json.dump([[row["input_ids"], row["labels"]] for row in trainer.train_dataset], open(f"{folder}/found.json", "w"))
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
def test_tokens_and_labels_are_those_of_trl(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(kind)))
    tokenizer = trained_tokenizer(tmp_path, path)
    tokenizer.save_pretrained(tmp_path)
    schema = conversations.Schema(chat=kind != "text")
    encoded = chat.encoder(tokenizer, schema).encode(list(conversations.find(str(path), None, schema).documents()))
    # without it TRL trains a completion's line break behind the end of the turn, too
    options = json.dumps({"assistant_only_loss": kind != "text"})
    environment = {**os.environ, "PYTHONPATH": TRL, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), options]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == len(encoded) == 40
    for ours, (ids, labels) in zip(encoded, found, strict=True):
        tokens = list(ours.tokens)
        assert tokens == ids
        assert [token if mark else -100 for token, mark in zip(tokens, ours.trained, strict=True)] == labels


def trained_tokenizer(folder: Path, path: Path) -> PreTrainedTokenizerFast:
    return tasks.load(make_recipe(folder, path, tokenizer={"vocabulary_size": 300})).tokenizer
