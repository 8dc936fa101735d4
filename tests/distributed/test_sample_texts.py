"""evaluate.samples: the texts are transformers' own, and the same under every strategy."""

from __future__ import annotations

import json

import pytest
from harness import long
from transformers import AutoModelForCausalLM, AutoTokenizer

COUNT = 2
OPTIONS = ("steps=20", f"evaluate.samples={COUNT}", "optimizer.learning_rate=0.02")


def samples(run) -> list[dict]:
    assert run.returncode == 0, run.output
    written = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in written] == [10] * COUNT + [20] * COUNT
    assert all(sample["text"] for sample in written)
    return written


def test_the_texts_are_what_transformers_generates(workspace):
    run = workspace.run(None, 1, *OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(run.directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    for sample in samples(run)[COUNT:]:
        prompt = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
        length = prompt["input_ids"].shape[1]
        # up to the row's length
        whole = model.generate(**prompt, max_new_tokens=32 - length, do_sample=False)
        assert tokenizer.decode(whole[0, length:]) == sample["text"]


@pytest.mark.parametrize("strategy", ["fsdp", *long("zero3", "pipeline", "fsdp_cp", "tp")])
def test_every_strategy_writes_the_same_texts(strategy, workspace):
    assert samples(workspace.run(strategy, 2, *OPTIONS)) == samples(workspace.run(None, 1, *OPTIONS))
