from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from tiny_recipes import make_recipe

from samecurve.config.schema import Recipe
from samecurve.data import token_store, tokenizer
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.data.datasets.base import DocumentRows, PackedRows
from samecurve.errors import DataError
from samecurve.interfaces.engine import EvalResult
from samecurve.losses.cross_entropy import IGNORE_INDEX, token_loss_sum
from samecurve.tasks import registry

TEXTS = [f"def function_{i}(x):\n    return x + {i}  # naïve {'é' * i}\n" for i in range(40)]


def made(tmp_path, data: dict | None = None, evaluate: dict | None = None, batch: dict | None = None) -> Recipe:
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for index, text in enumerate(TEXTS):
        (folder / f"{index:02}.py").write_text(text)
    sizes = {"global_batch_size": 4, "sequence_length": 16, **(batch or {})}
    blocks = {"data": data or {}, "evaluate": evaluate or {}, "batch": sizes, "tokenizer": {"vocabulary_size": 300}}
    return make_recipe(tmp_path, folder, "pretrain", **blocks)


def test_packed_rows_hold_the_documents(tmp_path):
    task = registry.load_task(made(tmp_path))
    assert isinstance(task.train, PackedRows)
    assert task.validation is None
    assert task.vocabulary_size == len(task.tokenizer) == 300
    assert task.special_tokens == {
        "bos_token_id": task.tokenizer.convert_tokens_to_ids("<|begin_of_text|>"),
        "eos_token_id": task.tokenizer.convert_tokens_to_ids("<|end_of_text|>"),
    }
    tokens = task.train.stream.tokens.tolist()
    begin, end = task.tokenizer.bos_token, task.tokenizer.eos_token
    assert task.tokenizer.decode(tokens) == "".join(f"{begin}{text}{end}" for text in TEXTS)


def test_end_of_text_is_trained_and_begin_of_text_is_not(tmp_path):
    task = registry.load_task(made(tmp_path))
    labels = task.train[np.arange(len(task.train))].labels
    assert (labels == task.tokenizer.eos_token_id).sum() == len(TEXTS)
    assert (labels == task.tokenizer.bos_token_id).sum() == 0


def test_documents_are_rows_without_packing(tmp_path):
    task = registry.load_task(made(tmp_path, {"packing": False}))
    assert isinstance(task.train, DocumentRows)
    assert len(task.train) == len(TEXTS)
    assert task.describe()["train"]["truncated_documents"] > 0


def test_the_held_out_part_is_not_trained_on(tmp_path):
    task = registry.load_task(made(tmp_path, {"validation_fraction": 0.3, "packing": False}))
    described = task.describe()
    assert described["train"]["documents"] + described["held_out"]["documents"] == len(TEXTS)
    assert 2 < described["held_out"]["documents"] < 25


@pytest.mark.parametrize("kind", ["path", "mixture"])
def test_a_small_fraction_holds_out_one_document(tmp_path, kind):
    """The one with the lowest hash, with its copy, and the trained tokenizer does not learn from it either."""
    lowest = min(TEXTS, key=lambda text: hashlib.sha256(text.encode()).digest())
    made(tmp_path)
    (tmp_path / "data" / "copy.txt").write_text(lowest)
    learnt = []
    original = token_store.training_texts
    data = {"validation_fraction": 1e-9, "packing": False}
    if kind == "mixture":
        (tmp_path / "more.txt").write_text(TEXTS[0])
        sources = [{"path": str(tmp_path / name), "weight": 1} for name in ("data", "more.txt")]
        data |= {"path": None, "mixture": sources}
    recipe = made(tmp_path, data, batch={"global_batch_size": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "training_texts", lambda *given: learnt.extend(original(*given)) or iter(learnt))
        task = registry.load_task(recipe)
    assert lowest not in learnt and len(learnt) >= len(TEXTS) - 1
    held_out = task.validation.parts[0].stream
    assert [len(part.stream.offsets) - 1 for part in task.validation.parts][0] == 2
    begin, end = task.tokenizer.bos_token, task.tokenizer.eos_token
    assert task.tokenizer.decode(held_out.tokens.tolist()) == f"{begin}{lowest}{end}" * 2


def test_evaluation_from_a_path_of_its_own_holds_nothing_out(tmp_path):
    (tmp_path / "evaluation.txt").write_text("x = 1\n")
    evaluate = {"path": str(tmp_path / "evaluation.txt")}
    described = registry.load_task(made(tmp_path, {"validation_fraction": 0.3}, evaluate)).describe()
    assert (described["train"]["documents"], described["held_out"]["documents"]) == (len(TEXTS), 1)


def test_loss_is_the_token_sum(tmp_path):
    task = registry.load_task(made(tmp_path))
    logits, labels = torch.randn(2, 5, 300), torch.randint(0, 300, (2, 5))
    assert torch.equal(task.loss(logits, labels), token_loss_sum(logits, labels))


def test_bits_per_byte_worked_out_by_hand(tmp_path):
    task = registry.load_task(made(tmp_path, {"validation_fraction": 0.3}))
    stream = task.validation.stream
    text = task.tokenizer.decode(stream.tokens.tolist(), skip_special_tokens=True)
    num_targets = len(stream.tokens) - (len(stream.offsets) - 1)
    metrics = task.metrics(EvalResult(loss=2 * math.log(2), tokens=num_targets))
    assert metrics["eval_loss"] == pytest.approx(1.386294, abs=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(4.0)
    # Two bits per token; every byte of the text is in some target, end-of-text has none.
    assert metrics["eval_bits_per_byte"] == pytest.approx(2 * num_targets / len(text.encode()))
    assert metrics["eval_tokens"] == num_targets


def test_a_hopeless_loss_is_still_a_number(tmp_path):
    task = registry.load_task(made(tmp_path, {"validation_fraction": 0.3}))
    metrics = task.metrics(EvalResult(loss=5000.0, tokens=task.validation.num_targets))
    assert math.isfinite(metrics["eval_perplexity"])


@pytest.mark.parametrize("packing", [True, False])
def test_training_and_evaluation_batches_of_a_real_task(tmp_path, packing):
    recipe = made(tmp_path, {"validation_fraction": 0.3, "packing": packing})
    task = registry.load_task(recipe)
    (micro_batches,) = StepBatches(task.train, recipe.seed, recipe.batch, (1, 2), num_steps=1)
    assert [tuple(m.inputs["input_ids"].shape) for m in micro_batches] == [(1, 16), (1, 16)]
    assert all(
        m.inputs["input_ids"].dtype == m.inputs["position_ids"].dtype == m.labels.dtype == torch.int64
        for m in micro_batches
    )
    shards = [EvaluationBatches(task.validation, 2, (rank, 2)) for rank in range(2)]
    trained = sum(int((m.labels != IGNORE_INDEX).sum()) for shard in shards for m in shard)
    assert trained == task.validation.num_targets


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch": {"global_batch_size": 5000}},
            "training rows of batch.sequence_length=16 are fewer than batch.global_batch_size=5000; give more data, or "
            "lower one of the two",
        ),
        (
            {"batch": {"global_batch_size": 3, "sequence_length": 4096}},
            "batch.global_batch_size=3, into which 40 documents are packed; data.packing=false makes a row of each",
        ),
        (
            {"batch": {"global_batch_size": 32, "sequence_length": 64}},
            "; batch.global_batch_size=4 would be about 4 steps per epoch, and 14 would be 1",
        ),
        (
            {"data": {"validation_fraction": 1e-9, "pattern": "00.py"}, "batch": {"global_batch_size": 1}},
            "no document is held out (data.validation_fraction=1e-09 of 1 documents, each kept whole); "
            "raise the fraction, or set evaluate.path to a separate file",
        ),
    ],
)
def test_too_little_data(tmp_path, change, message):
    """Of rows that are packed, the message says of how many documents they are made."""
    with pytest.raises(DataError) as caught:
        registry.load_task(made(tmp_path, **change))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'data'}: ")


def test_no_documents_at_all(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="empty.jsonl: there are no rows"):
        registry.load_task(made(tmp_path, {"path": str(tmp_path / "empty.jsonl")}))
