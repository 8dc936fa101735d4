"""`inspect --leak_test` on models that keep tokens apart, and on models that do not."""

from __future__ import annotations

import re

import pytest
import torch
from tiny_recipes import jsonl, recipe_file
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama

from samecurve.cli import commands
from samecurve.inference import leak_test

TEXTS = ["a long text about this and that", "short", "another text of middle length", "four", "and so on", "the end"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SIZES}
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}
LFM2 = {"model_type": "lfm2", **SIZES, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
BERT = {"model_type": "bert", **SIZES, "max_position_embeddings": 64}


@pytest.fixture
def verdict(tmp_path, capsys):
    """Runs the command; returns (exit code, standard output, standard error)."""

    def run(config: dict, *overrides: str) -> tuple[int, str, str]:
        rows = [{"text": text, "label": index % 2} for index, text in enumerate(TEXTS)]
        blocks = {"model": {"config": config}, "tokenizer": {"vocabulary_size": 260}}
        recipe = recipe_file(tmp_path, jsonl(tmp_path / "texts.jsonl", *rows), "pretrain", **blocks)
        code = commands.main(["inspect", recipe, "--leak_test", *overrides])
        return code, *capsys.readouterr()

    return run


def blind(*_, **__) -> None:
    """In place of what makes a mask."""


def test_a_model_that_keeps_documents_apart(verdict):
    code, out, _ = verdict(LLAMA)
    assert code == 0
    assert "llama with varlen attention in fp32, untrained weights\n" in out  # as in training: bf16 on a CPU
    assert re.search(
        r"^packed documents +row 0: \d documents; changing one .* of others by at most 0.0e\+00$", out, re.M
    )
    assert re.search(r"^causality +row 0: changing token \d+ .* to its left by at most 0.0e\+00$", out, re.M)
    assert re.search(r"^padding +not tested: rows are causal", out, re.M)
    assert out.endswith("no leak found\n")


def test_documents_that_are_separated(verdict):
    code, out, _ = verdict(LFM2)
    assert code == 0 and re.search(
        r"^packed documents +row 0: \d documents; .* of others by at most 0.0e\+00$", out, re.M
    )


def test_documents_that_see_each_other(verdict):
    """A family that ignores position_ids; training refuses it."""
    code, _, err = verdict(BLOOM)
    assert code == 2
    assert re.search(r"leak test: the documents of a packed row see each other: in row 0, of which \d documents", err)
    assert "set data.packing=false" in err


def test_a_mask_without_documents(verdict, monkeypatch):
    """sdpa without a mask is causal, and that is all."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", blind)
    code, _, err = verdict(LLAMA, "model.attention=sdpa")
    assert code == 2 and "the documents of a packed row see each other" in err


def test_a_mask_that_is_not_causal(verdict, monkeypatch):
    def seeing(config, inputs_embeds, **_):
        return inputs_embeds.new_zeros(1, 1, *[inputs_embeds.shape[1]] * 2)

    assert verdict(LLAMA, "model.attention=sdpa", "data.packing=false")[0] == 0
    monkeypatch.setattr(modeling_llama, "create_causal_mask", seeing)
    code, out, err = verdict(LLAMA, "model.attention=sdpa", "data.packing=false")
    assert code == 2 and "packed documents  not tested: none of 6 rows has two documents\n" in out
    assert "leak test: a token sees those to its right: in row 0, changing token " in err


def test_padding(verdict, monkeypatch):
    classify = ("task=classify", "data.packing=false")
    code, out, _ = verdict(BERT, *classify)
    assert code == 0
    assert re.search(r"^causality +not tested: a sequence classifier may see both sides$", out, re.M)
    assert re.search(r"^padding +row 0: without its padding its outputs move by at most \S+$", out, re.M)
    monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", blind)
    code, _, err = verdict(BERT, *classify)
    assert code == 2 and re.search(r"leak test: tokens see padding: without the padding of row 0 \(\d+ tokens", err)


def test_rows_that_allow_no_check_are_not_called_free_of_leaks(verdict):
    """Rows of one text each, all cut to the length of a row, for a model that may see both sides."""
    code, out, _ = verdict(BERT, "task=classify", "data.packing=false", "batch.sequence_length=4")
    assert code == 0 and out.count("not tested: ") == 3
    assert out.endswith("nothing was tested\n")


def test_a_window_around_a_boundary_by_hand():
    """Documents of 300 and 200 tokens: 128 of the first remain, counted from 0, and 128 of the second."""
    positions = torch.cat([torch.arange(300), torch.arange(200)])[None]
    place = leak_test.document_boundary({"position_ids": positions})
    assert place == 300
    cut = leak_test._window({"position_ids": positions, "input_ids": torch.arange(500)[None]}, place)
    assert cut["position_ids"].tolist() == [[*range(128), *range(128)]]
    assert cut["input_ids"].tolist() == [list(range(172, 428))]
    assert leak_test.documents_of(cut) == [slice(0, 128), slice(128, 256)]
