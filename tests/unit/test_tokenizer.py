from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from file_damage import DAMAGES
from tiny_recipes import make_recipe
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from samecurve.config.schema import Recipe
from samecurve.data import tokenizer as tokenizers_of_recipes
from samecurve.errors import ConfigurationError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café — 日本語 🙂\r\n\ttab",
    " leading and trailing  ",
    "<|end_of_text|> is text here",
]


def made(tmp_path, model: dict | None = None, vocabulary_size: int | None = 300, path: str | None = None) -> Recipe:
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text * 20)
    blocks = {"tokenizer": {"vocabulary_size": vocabulary_size, "path": path}, "model": model or {}}
    return make_recipe(tmp_path, folder, "pretrain", **blocks)


def test_trained_on_the_data(tmp_path):
    tokenizer = tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    assert len(tokenizer) == 300
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|end_of_text|>",
    )
    for text in [*TEXTS, "never seen: Ω≈ç√∫"]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]) < len(TEXTS[0])
    assert tokenizer("x")["input_ids"] == [
        tokenizer.bos_token_id,
        *tokenizer("x", add_special_tokens=False)["input_ids"],
    ]


def test_training_is_deterministic_across_processes(tmp_path):
    program = """
import sys
from samecurve.data import sources, tokenizer
tokenizer.train_tokenizer(sources.find_source(sys.argv[1]), 0.0, 400).save(sys.argv[2])
"""
    made(tmp_path)
    for seed in "12":
        environment = {"PYTHONHASHSEED": seed, "PATH": "", "RAYON_NUM_THREADS": seed}
        command = [sys.executable, "-c", program, str(tmp_path / "data"), str(tmp_path / f"{seed}.json")]
        subprocess.run(command, check=True, env=environment)
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()


def test_training_is_cached_and_keyed_by_content(tmp_path, monkeypatch):
    tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers_of_recipes, "train_tokenizer", lambda *_, **__: pytest.fail("trained again"))
        tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    tokenizers_of_recipes.load_tokenizer(made(tmp_path, vocabulary_size=310))
    (tmp_path / "data" / "new.txt").write_text("more")
    tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "damage"), [*(("tokenizer.json", damage) for damage in DAMAGES), ("files.json", "cut")]
)
def test_a_damaged_tokenizer_is_trained_again(tmp_path, capsys, name, damage):
    expected = tokenizers_of_recipes.load_tokenizer(made(tmp_path)).backend_tokenizer.to_str()
    (file,) = (tmp_path / "cache").rglob(name)
    capsys.readouterr()
    assert DAMAGES[damage](file)
    assert tokenizers_of_recipes.load_tokenizer(made(tmp_path)).backend_tokenizer.to_str() == expected
    assert capsys.readouterr().out.startswith(f"{file.parent}: {name} ")


def test_saved_and_loaded_by_path(tmp_path):
    trained = tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    trained.save_pretrained(tmp_path / "saved")
    for recipe in (
        made(tmp_path, vocabulary_size=None, path=str(tmp_path / "saved")),
        made(tmp_path, vocabulary_size=None, model={"path": str(tmp_path / "saved")}),
    ):
        loaded = tokenizers_of_recipes.load_tokenizer(recipe)
        assert loaded(TEXTS[1])["input_ids"] == trained(TEXTS[1])["input_ids"]
        assert loaded.eos_token_id == trained.eos_token_id
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert reloaded.decode(trained(TEXTS[0])["input_ids"], skip_special_tokens=True) == TEXTS[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/nowhere/at/all"}, "/nowhere/at/all: the tokenizer's folder does not exist; correct tokenizer.path"),
        ({"path": "DATA"}, "DATA: no tokenizer could be loaded ("),
        ({}, "no tokenizer: set tokenizer.path, or tokenizer.vocabulary_size"),
    ],
)
def test_errors_name_the_path_and_the_fix(tmp_path, options, message):
    options = {"vocabulary_size": None} | options
    if options.get("path") == "DATA":
        options["path"] = str(tmp_path / "data")
    with pytest.raises(ConfigurationError) as caught:
        tokenizers_of_recipes.load_tokenizer(made(tmp_path, **options))
    assert str(caught.value).replace(str(tmp_path / "data"), "DATA").startswith(message)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_lengths_add_up_to_the_text(tmp_path, text):
    tokenizer = tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    lengths = tokenizers_of_recipes.byte_lengths(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert lengths[ids].sum() == len(text.encode())


def test_special_tokens_have_no_bytes_and_added_words_have_theirs(tmp_path):
    tokenizer = tokenizers_of_recipes.load_tokenizer(made(tmp_path))
    tokenizer.add_tokens(["größe"])
    lengths = tokenizers_of_recipes.byte_lengths(tokenizer)
    assert lengths.shape == (301,)
    assert lengths[[tokenizer.bos_token_id, tokenizer.eos_token_id]].tolist() == [0, 0]
    assert lengths[300] == 7


def test_byte_lengths_of_a_sentencepiece_vocabulary():
    words = ["<unk>", "<0x0A>", "\u2581", "\u2581the", "é", "<0x0", "日本"]
    rust = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>")
    assert tokenizers_of_recipes.byte_lengths(tokenizer).tolist() == [0, 1, 1, 4, 2, 4, 6]
    assert tokenizers_of_recipes.byte_lengths(tokenizer).dtype == np.int32
