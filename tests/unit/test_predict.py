"""`predict` on small exports, against transformers' own pipelines."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from samecurve.cli import commands
from samecurve.config.schema import Data, Recipe
from samecurve.inference import loading, predictions, predictor

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NAMES = {0: "cold", 1: "mild", 2: "warm"}
KINDS = {
    "classify": ("bert", AutoModelForSequenceClassification, {"id2label": NAMES}),
    "multi_label": (
        *("bert", AutoModelForSequenceClassification),
        {"id2label": NAMES, "problem_type": "multi_label_classification"},
    ),
    "relevance": (
        *("bert", AutoModelForSequenceClassification),
        {"num_labels": 1, "problem_type": "multi_label_classification"},
    ),
    "regression": ("bert", AutoModelForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
    "words": ("bert", AutoModelForTokenClassification, {"id2label": NAMES}),
    "reward": ("llama", AutoModelForSequenceClassification, {"num_labels": 1}),
    "embed": ("bert", AutoModel, {}),
    "mlm": ("bert", AutoModelForMaskedLM, {}),
    "causal": ("llama", AutoModelForCausalLM, {}),
}
TEXTS = ["a", "the cat sat on the mat", "no"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<pad>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def made_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, as in a tokenizer that samecurve trains."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*alphabet, "<s>", "<pad>", "[MASK]", "Ġc", "at", "Ġcat"))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[("Ġ", "c"), ("a", "t"), ("Ġc", "at")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    begin = ("<s>", vocab["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B:1", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<pad>", pad_token="<pad>", mask_token="[MASK]"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found, tokenizer = {}, made_tokenizer()
    for kind, (family, auto, fields) in KINDS.items():
        torch.manual_seed(3)
        fields = {**SIZES, "max_position_embeddings": 40, **fields}
        config = AutoConfig.for_model(family, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **fields)
        found[kind] = tmp_path_factory.mktemp(kind) / "model"
        model = auto.from_config(config)
        with torch.no_grad():  # not near zero, where every answer is the same
            for parameter in model.parameters():
                parameter.mul_(4)
        model.save_pretrained(found[kind])
        tokenizer.chat_template = TEMPLATE if kind == "reward" else None
        tokenizer.save_pretrained(found[kind])
    return found


def numbers(answer) -> list[float]:
    """All numbers of predictions, in order."""
    if isinstance(answer, float):
        return [answer]
    parts = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, list) else ()
    return [number for part in parts for number in numbers(part)]


def predicted(capsys, *arguments) -> list[dict]:
    assert commands.main(["predict", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_class_is_what_transformers_says(folders, capsys):
    found = predicted(capsys, folders["classify"], *TEXTS)
    classify = pipeline("text-classification", model=str(folders["classify"]), device="cpu", top_k=None)
    for text, answer in zip(TEXTS, found, strict=True):
        expected = {each["label"]: each["score"] for each in classify([text])[0]}
        assert answer["text"] == text and answer["probabilities"] == pytest.approx(expected, rel=1e-4)
        assert answer["label"] == max(expected, key=expected.get)
        assert answer["probability"] == max(answer["probabilities"].values()) and answer["truncated"] is False
    one_by_one = predicted(capsys, folders["classify"], *TEXTS, "--batch_size", 1)  # no padding
    for one, together in zip(one_by_one, found, strict=True):
        assert one["probabilities"] == pytest.approx(together["probabilities"], rel=1e-4)


def test_a_words_class_is_that_of_its_first_token(folders, capsys):
    text = "the cat sat on the mat"
    (answer,) = predicted(capsys, folders["words"], text)
    words = pipeline("token-classification", model=str(folders["words"]), aggregation_strategy="none")(text)
    # a word's first byte-level token begins with the space before it
    starts = [0, *(index for index, letter in enumerate(text) if letter == " ")]
    first = [min((t for t in words if t["end"] > start), key=lambda t: t["start"]) for start in starts]
    assert [word["word"] for word in answer["words"]] == text.split()
    assert [word["label"] for word in answer["words"]] == [token["entity"] for token in first]
    expected = [token["score"].item() for token in first]
    assert [word["probability"] for word in answer["words"]] == pytest.approx(expected, rel=1e-4)


def test_half_a_character_is_written_as_json_can(tmp_path):
    lines = [{"text": "a\udcff \u00e9"}]
    assert list(predictions._written(iter(lines), tmp_path / "a.jsonl")) == lines
    assert json.loads((tmp_path / "a.jsonl").read_text(encoding="utf-8")) == lines[0]


@pytest.mark.parametrize("kind", ["multi_label", "relevance", "regression"])
def test_scores_are_what_transformers_says(kind, folders, capsys):
    answers = predicted(capsys, folders[kind], *TEXTS)
    classify = pipeline("text-classification", model=str(folders[kind]), device="cpu", top_k=None)
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = {label["label"]: label["score"] for label in classify([text])[0]}
        if kind == "multi_label":
            assert answer["probabilities"] == pytest.approx(expected, rel=1e-4)
            assert answer["labels"] == [name for name in NAMES.values() if expected[name] > 0.5]
        else:
            assert [answer["score"]] == pytest.approx(list(expected.values()), rel=1e-4)


def test_fillers_are_what_transformers_says_and_hide_the_space(folders, capsys):
    """The tokens of "a[MASK] x": a mask that left the space before it to a token of its own is not what was trained."""
    (found,) = predicted(capsys, folders["mlm"], "a [MASK] x <mask>", "--top_k", 3)
    assert [len(mask) for mask in found["masks"]] == [3, 3]
    expected = pipeline("fill-mask", model=str(folders["mlm"]), device="cpu", top_k=3)("a[MASK] x[MASK]")
    for mask, other in zip(found["masks"], expected, strict=True):
        assert [each["probability"] for each in mask] == pytest.approx([each["score"] for each in other], rel=1e-4)
        assert [each["token"] for each in mask] == [each["token_str"].strip() for each in other]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"causal"}))
def test_bf16_is_near_fp32(kind, folders, capsys):
    arguments = (folders[kind], "--prompt", "is it?") if kind == "reward" else (folders[kind],)
    texts = [f"{text} [MASK]" for text in TEXTS] if kind == "mlm" else TEXTS
    exact, rounded = (
        np.array(numbers(predicted(capsys, *arguments, "--precision", precision, *texts)))
        for precision in ("fp32", "bf16")
    )
    assert 0 < np.abs(exact - rounded).max() < 0.1


@pytest.mark.parametrize(
    ("device", "recipe", "dtype"),
    [
        ("cpu", "bf16", torch.float32),
        ("cuda", "bf16", torch.bfloat16),
        ("cuda", "fp32", torch.float32),
        ("cuda", None, torch.bfloat16),
    ],
)
def test_the_default_precision(device, recipe, dtype, monkeypatch):
    monkeypatch.setattr(loading, "default_device", lambda: torch.device(device))
    recipe = Recipe.model_construct(precision=recipe) if recipe else None
    assert loading.inference_dtype(None, recipe) == dtype and loading.inference_dtype("fp16", recipe) == torch.float16


def test_a_score_is_of_the_whole_conversation(folders, tmp_path, capsys):
    found = predicted(capsys, folders["reward"], "yes", "not at all", "--prompt", "is it?")
    model = AutoModelForSequenceClassification.from_pretrained(folders["reward"]).eval()
    for text, answer in zip(("yes", "not at all"), found, strict=True):
        ids = made_tokenizer()(f"<user>is it?<assistant>{text}<pad>", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            expected = model(**{name: ids[name] for name in ("input_ids", "attention_mask")}).logits.item()
        assert (answer["text"], answer["score"]) == (text, pytest.approx(expected, rel=1e-4))
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "yes"}]
    file.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "is it?", "completion": "yes"}))
    scores = [each["score"] for each in predicted(capsys, folders["reward"], "--file", file)]
    assert scores == pytest.approx([found[0]["score"]] * 2, rel=1e-5)


def test_a_score_of_the_end_where_training_kept_it(folders, monkeypatch):
    scorer = predictor.load_predictor(folders["reward"], prompt="is it?")
    right = scorer.encode("", "a" * 60)
    monkeypatch.setattr(predictor.Scorer, "data", Data(truncation="left"))
    left = scorer.encode("", "a" * 60)
    whole = made_tokenizer()(f"<user>is it?<assistant>{'a' * 60}<pad>", add_special_tokens=False)["input_ids"]
    assert (list(right.tokens), list(left.tokens)) == (whole[:40], whole[-40:]) and left.truncated


def test_a_score_is_of_the_runs_own_day(folders, monkeypatch):
    """Where a chat template writes today's date."""
    given: list = []
    scorer = predictor.load_predictor(folders["reward"], prompt="is it?")
    recipe = SimpleNamespace(tokenizer=SimpleNamespace(template_date="2026-01-02"), data=Data(path="x"))
    monkeypatch.setattr(predictor.chat_encoder, "encoder", lambda *words, **_: given.append(words[2]))
    monkeypatch.setattr(scorer, "recipe", recipe)
    _ = scorer.encoder
    assert given == ["2026-01-02"]


def test_vectors_and_their_table(folders, capsys, monkeypatch):
    found = torch.tensor([each["embedding"] for each in predicted(capsys, folders["embed"], *TEXTS)])
    model = AutoModel.from_pretrained(folders["embed"], add_pooling_layer=False).eval()
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            mean = model(made_tokenizer()(text, return_tensors="pt")["input_ids"]).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(vector, mean / mean.norm(), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert commands.main(["predict", str(folders["embed"]), *TEXTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [float(value) for value in lines[1].split()[1:4]] == pytest.approx((found @ found.T)[1].tolist(), abs=1e-3)
    many = [f"{text} {number}" for number in range(6) for text in TEXTS]
    assert commands.main(["predict", str(folders["embed"]), *many]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18 and all("is nearest to" in line for line in lines)


def test_no_vectors_without_the_layers_behind_the_pooling(folders, capsys, tmp_path):
    folder = shutil.copytree(folders["embed"], tmp_path / "dense")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [{"idx": n, "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert commands.main(["predict", str(folder), *TEXTS]) == 2
    assert f"{folder} has Dense behind its pooling (modules.json)" in capsys.readouterr().err


def test_what_a_terminal_shows(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    (tmp_path / "texts.txt").write_text("a\n\n" + "b" * 100 + "\n")
    assert commands.main(["predict", str(folders["classify"]), "--file", str(tmp_path / "texts.txt")]) == 0
    told = capsys.readouterr()
    first, second = told.out.splitlines()
    assert first.endswith("  a") and second.endswith("bbb...") and first.split()[0] in NAMES.values()
    assert told.err == "1 text was truncated to 40 tokens, as in training\n"
    assert commands.main(["predict", str(folders["mlm"]), "a [MASK]", "--json", "-"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["text"] == "a [MASK]"
    assert commands.main(["predict", str(folders["mlm"]), "a [MASK]", "--json", str(tmp_path / "found.jsonl")]) == 0
    assert (tmp_path / "found.jsonl").read_text() == shown and capsys.readouterr().out.startswith("a [MASK]")


def test_lines_of_the_input_and_columns_of_a_table(folders, tmp_path, capsys, monkeypatch):
    expected = predicted(capsys, folders["classify"], *TEXTS)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert predicted(capsys, folders["classify"]) == expected
    (tmp_path / "rows.csv").write_text("label,text\n" + "".join(f"x,{text}\n" for text in TEXTS))
    assert predicted(capsys, folders["classify"], "--file", tmp_path / "rows.csv") == expected


@pytest.mark.parametrize(
    ("kind", "arguments", "code", "text"),
    [
        ("causal", ["a"], 2, "the model generates text; use python -m samecurve generate"),
        ("classify", ["a", "--top_k", "2"], 2, "--top_k: only for a masked language model"),
        ("classify", ["a", "--prompt", "b"], 2, "--prompt: only for a reward model"),
        ("classify", ["a", "--batch_size", "0"], 2, "--batch_size: found 0, but it must be at least 1"),
        ("classify", ["a", "--file", "b"], 2, "--file: cannot be combined with TEXT"),
        ("classify", ["--file", "nowhere"], 2, "--file: no such file"),
        ("classify", [" "], 3, "TEXT 1: the text is empty"),
        (
            "classify",
            ["--file", "rows.jsonl"],
            3,
            "rows.jsonl:1: no column 'text', found: txt; add it, or remove the row",
        ),
        ("classify", ["--file", "empty.txt"], 3, "empty.txt: no text found"),
        ("reward", ["a"], 2, "a reward model scores answers to a prompt; give --prompt TEXT"),
        ("mlm", ["a"], 3, "TEXT 1: no [MASK]; write [MASK] in place of the word"),
        ("mlm", [f"{'a' * 60} [MASK]"], 3, "TEXT 1: no [MASK] among its first 40 tokens"),
    ],
)
def test_mistakes(kind, arguments, code, text, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"txt": "a"}\n')
    Path("empty.txt").write_text("\n")
    assert commands.main(["predict", str(folders[kind]), *arguments]) == code
    assert text in capsys.readouterr().err
    if kind not in ("causal", "mlm"):
        assert commands.main(["generate", str(folders[kind])]) == 2
        assert "use python -m samecurve predict" in capsys.readouterr().err
