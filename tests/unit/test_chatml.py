"""A base model, which has no chat template, is given ChatML: its tokens, its embedding, what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import make_tokenizer
from tiny_recipes import jsonl, make_recipe
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from samecurve.cli import commands
from samecurve.config.schema import Recipe
from samecurve.data.tokenizer import apply_chatml
from samecurve.errors import DataError
from samecurve.export.config_files import write_generation_config
from samecurve.export.hf_export import ExportTarget, export
from samecurve.interfaces.task import Task
from samecurve.models.lora import trained_shapes
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weights import load_weights
from samecurve.tasks import registry

LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def base_model(folder: Path, num_rows: int, tied: bool) -> PreTrainedTokenizerFast:
    """256 bytes and an end of text, whose model has num_rows rows; as transformers writes it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    assert len(tokenizer) == 257
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=num_rows, tie_word_embeddings=tied, **LLAMA)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def made(tmp_path: Path, **more) -> Recipe:
    rows = [{"prompt": f"a question {n}", "completion": f"an answer {n}"} for n in range(4)]
    blocks = {"model": {"path": str(tmp_path / "base")}, "tokenizer": {"vocabulary_size": None}, **more}
    batch = {"global_batch_size": 2, "sequence_length": 128}
    path = jsonl(tmp_path / "data.jsonl", *rows)
    return make_recipe(tmp_path, path, data={"packing": False}, batch=batch, **blocks)


CHATML = {"tokenizer": {"chat_template": "chatml", "vocabulary_size": None}}


def filled(recipe: Recipe) -> tuple[Task, PreTrainedModel, dict[str, torch.Tensor]]:
    task = registry.load_task(recipe)
    model = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    found = {}
    load_weights(model, recipe, lambda name, tensor: found.__setitem__(name, tensor.clone()))
    return task, model, found


def test_a_base_model_has_no_template_and_is_told_of_one(tmp_path):
    base_model(tmp_path / "base", 257, tied=True)
    with pytest.raises(DataError, match="no chat template; .*tokenizer.chat_template .* chatml"):
        registry.load_task(made(tmp_path))


@pytest.mark.parametrize("num_rows", [264, 257])
@pytest.mark.parametrize("tied", [True, False])
def test_its_tokens_are_added_and_the_end_of_a_turn_is_trained(num_rows, tied, tmp_path):
    """264: there is room for the two. 257: there is none, so they begin as the mean of all other tokens."""
    base_model(tmp_path / "base", num_rows, tied)
    task, model, weights = filled(made(tmp_path, **CHATML))
    assert task.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [257, 258]
    assert task.tokenizer.eos_token == "<|im_end|>"
    labels = task.train[np.array([0])].labels[0]
    trained = labels[labels >= 0].tolist()
    assert task.tokenizer.decode(trained) in [f"an answer {n}<|im_end|>" for n in range(4)]
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert model.config.vocab_size == max(num_rows, 259)
    for name in ("model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])):
        assert weights[name].shape == (max(num_rows, 259), 16)
        assert torch.equal(weights[name][:num_rows], stored[name])
        mean = stored[name].mean(dim=0).expand(259 - 257, 16)
        assert num_rows > 257 or torch.allclose(weights[name][257:], mean)


def test_what_is_exported_is_read_without_the_recipe(tmp_path):
    base_model(tmp_path / "base", 257, tied=True)
    task = registry.load_task(made(tmp_path, **CHATML))
    task.tokenizer.save_pretrained(tmp_path / "again")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert again.apply_chat_template(turns, tokenize=False) == text
    assert len(again(text)["input_ids"]) == len("user\na" + "\n" + "assistant\nb" + "\n") + 4


@pytest.mark.parametrize("num_rows", [257, 264])
def test_an_adapter_trains_no_new_rows(num_rows, tmp_path):
    """264: the embedding has rows to spare, which nobody has trained either."""
    base_model(tmp_path / "base", num_rows, tied=True)
    with pytest.raises(DataError, match=r"chatml adds <\|im_start\|> and <\|im_end\|> to .*does not train"):
        registry.load_task(made(tmp_path, **CHATML, adapter={"name": "lora"}))


def with_own_tokens(folder: Path) -> None:
    """A base model that always writes <|im_end|> and would end with another token; its generation config is stored."""
    tokenizer = base_model(folder, 264, tied=False)
    apply_chatml(tokenizer)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for parameter in (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight[258]):
            parameter.fill_(1.0)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(STORED))


# with a value that save_pretrained refuses, as some base models have
STORED = {"eos_token_id": [256, 7], "do_sample": False, "temperature": 0.7, "repetition_penalty": 1.05}


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_the_export_stops_and_keeps_its_generation_config(adapter, tmp_path):
    with_own_tokens(tmp_path / "base")
    task, shape, weights = filled(made(tmp_path, **CHATML, adapter={"name": adapter}))
    shape.config.eos_token_id = 256
    folder = tmp_path / "run" / "model"
    trained = {name: weights[name] for name in trained_shapes(shape)}
    export(iter(trained.items()), shape, ExportTarget(folder, task.tokenizer), True)
    if adapter is not None:
        generation = GenerationConfig.from_pretrained(folder)
        assert commands.main(["merge", str(folder)]) == 0
        folder /= "merged"
        assert generation.to_dict() == GenerationConfig.from_pretrained(folder).to_dict()
    generator = pipeline("text-generation", model=str(folder), device="cpu")
    (answer,) = generator([[{"role": "user", "content": "a"}]], max_new_tokens=5, return_tensors=True)
    assert answer[0]["generated_token_ids"].count(258) == 2  # of the question, and all of the answer
    stored = json.loads((folder / "generation_config.json").read_text())
    assert {key: stored.get(key, GenerationConfig().to_dict()[key]) for key in STORED} == STORED | {
        "eos_token_id": [256, 7, 258]
    }
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 258


@pytest.mark.parametrize(
    ("family", "stored", "added"),
    [
        ("chatml", ["<|im_end|>", "<|endoftext|>"], []),  # as Qwen 3 stores them
        ("llama3", ["<|start_header_id|>", "<|finetune_right_pad_id|>", "<|eot_id|>"], []),  # three, as Llama 3
        ("gemma", ["<eos>", "<pad>"], ["<end_of_turn>"]),
        ("gemma", "<eos>", ["<end_of_turn>"]),
    ],
)
def test_stored_stop_tokens_stay_and_turn_ends_join(family, stored, added, tmp_path):
    tokenizer = make_tokenizer(family)
    config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(stored))
    write_generation_config(config, tokenizer, tmp_path)
    names = [*([stored] if isinstance(stored, str) else stored), *added]
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.convert_tokens_to_ids(names)
