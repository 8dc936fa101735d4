"""classify and mlm: rows, counts and metrics by hand, and every way in which labelled rows cannot be used."""

# ruff: noqa: E501 - a message stands in one piece, so that a search for it finds it

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from report_cases import check_message
from safetensors.torch import save_file
from task_columns import unread
from tiny_recipes import jsonl, make_recipe
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertForMaskedLM

from samecurve.config.schema import Batch, Classify, Recipe
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.data.datasets.base import LengthGroups
from samecurve.data.datasets.text import LabelledRows, MaskedRows, Masking
from samecurve.data.find import PACKAGES
from samecurve.data.micro_batch import MicroBatch
from samecurve.data.token_store import TokenStream
from samecurve.errors import ConfigurationError, DataError
from samecurve.interfaces.engine import EvalResult
from samecurve.models import weights
from samecurve.models.skeleton import build_skeleton
from samecurve.tasks import registry

BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 64}
ROWS = [
    {"text": f"{word} " * count, "label": label} for word, label in (("ab", "no"), ("ba", "yes")) for count in (1, 9)
]


def made(tmp_path, rows=ROWS, task="classify", **data) -> Recipe:
    model, tokenizer = data.pop("model", {"config": BERT}), data.pop("tokenizer", {"vocabulary_size": 300})
    blocks = {"model": model, "tokenizer": tokenizer, "data": {"packing": False, **data}}
    blocks["batch"] = {"global_batch_size": 2, "sequence_length": 8}
    return make_recipe(tmp_path, jsonl(tmp_path / "rows.jsonl", *rows), task, **blocks)


def test_a_row_is_what_the_tokenizer_makes_of_the_text_and_its_class(tmp_path):
    task = registry.load_task(made(tmp_path))
    arrays = task.train[np.arange(4)]
    for index, row in enumerate(ROWS):
        ids = task.tokenizer(row["text"], truncation=True, max_length=8)["input_ids"]
        kept = arrays.inputs["attention_mask"][index] == 1
        assert arrays.inputs["input_ids"][index][kept].tolist() == ids
    assert arrays.labels.tolist() == [0, 0, 1, 1]
    assert task.names == ("no", "yes")
    assert task.splits.counts["truncated_documents"] == 2
    assert set(arrays.inputs) == {"input_ids", "attention_mask"}


def test_long_texts_are_cut_or_left_out_as_asked(tmp_path):
    left = registry.load_task(made(tmp_path, truncation="left"))
    arrays = left.train[np.arange(4)]
    left.tokenizer.truncation_side = "left"
    for index, row in enumerate(ROWS):
        kept = arrays.inputs["attention_mask"][index] == 1
        ids = left.tokenizer(row["text"], truncation=True, max_length=8)["input_ids"]
        assert arrays.inputs["input_ids"][index][kept].tolist() == ids
    dropped = registry.load_task(made(tmp_path, truncation="drop"))
    assert len(dropped.train) == len(ROWS) - 2 and dropped.splits.empty_documents == 0
    assert dropped.splits.counts["too_long_documents"] == 2
    with pytest.raises(DataError, match=r"2 of 4 rows .*\n.*:\d+: longer than the 8 tokens .*data\.truncation"):
        registry.load_task(made(tmp_path, truncation="error"))


@pytest.mark.parametrize("content", ["", '["no", "y', '["yes", "no"]', "[" * 100_000])
def test_damaged_class_names_are_read_again(tmp_path, content):
    registry.load_task(made(tmp_path))
    (file,) = (tmp_path / "cache" / "classes").glob("*/names.json")
    file.write_text(content)
    assert registry.load_task(made(tmp_path)).names == ("no", "yes")


def test_classes_of_a_csv(tmp_path):
    def classes(*labels: str, **data) -> tuple[tuple[str, ...], list[int]]:
        (tmp_path / "rows.csv").write_text(
            "".join(f"{line}\n" for line in ("text,label", *(f"ab,{x}" for x in labels)))
        )
        task = registry.load_task(made(tmp_path, path=str(tmp_path / "rows.csv"), **data))
        return task.names, task.train.stream.labels.tolist()

    assert classes("1", "0", "2", "10", *"3456789")[0] == tuple(map(str, range(11)))
    assert classes("True", "False", "True") == (("False", "True"), [1, 0, 1])
    assert classes("1.0", "0.0") == (("0.0", "1.0"), [1, 0])
    assert classes("1", "0", "yes", labels=("no", "yes")) == (("no", "yes"), [1, 0, 1])
    with pytest.raises(DataError, match="rows.csv:2: 'label' is 2, .* from 0 to 1"):
        classes("2", labels=("no", "yes"))


@pytest.mark.parametrize("kind", [int, str])
def test_numbers_that_are_names_are_no_places(kind, tmp_path):
    stars = ("1", "2", "3", "4", "5")
    rows = [{"text": f"ab {n}", "label": kind(n)} for n in (3, 1, 5)]
    assert registry.load_task(made(tmp_path, rows, labels=stars)).train.stream.labels.tolist() == [2, 0, 4]
    with pytest.raises(DataError, match="'label' is '0', which is not one of the classes 1, 2, 3, 4, 5"):
        registry.load_task(made(tmp_path, [*rows, {"text": "ab", "label": kind(0)}], labels=stars))


def test_pairs_say_which_text_a_token_is_from(tmp_path):
    rows = [{"text": "ab", "other": "ba ba ba ba ba ba", "label": n % 2} for n in range(4)]
    tokenizer = registry.load_task(made(tmp_path, rows, text_pair_column="other")).tokenizer
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}  # as a BERT's has them
    config.write_text(json.dumps(json.loads(config.read_text()) | names))
    task = registry.load_task(
        made(tmp_path, rows, tokenizer={"path": str(tmp_path / "tokenizer")}, text_pair_column="other")
    )
    arrays = task.train[np.array([0])]
    expected = task.tokenizer("ab", "ba ba ba ba ba ba", truncation=True, max_length=8)
    assert arrays.inputs["input_ids"][0].tolist() == expected["input_ids"]
    assert arrays.inputs["token_type_ids"][0].tolist() == expected["token_type_ids"]
    assert 0 < sum(expected["token_type_ids"]) < 8


def test_metrics_by_hand(tmp_path):
    """Of 3 x a and 1 x b, one a is taken for b: accuracy 3/4, F1 2*2/(2*2+1) = 4/5 and 2*1/(2*1+1) = 2/3; c: nothing."""
    task = registry.load_task(made(tmp_path, labels=("no", "yes", "never")))
    task.splits = task.splits.__class__(task.train, task.train, 0, {})
    logits = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])]
    found = task.statistics(logits, torch.tensor([0, 0, 0, 1, -100]))
    assert found.tolist() == [2, 1, 0, 0, 1, 0, 0, 0, 0]
    metrics = task.metrics(EvalResult(loss=0.5, tokens=4, statistics=tuple(found.tolist())))
    assert metrics == {
        "eval_loss": 0.5,
        "eval_accuracy": 0.75,
        "eval_f1": pytest.approx((4 / 5 + 2 / 3) / 2),
        "eval_rows": 4,
    }
    with pytest.raises(DataError, match="5 validation rows were evaluated and 4 classified, but the data have 4"):
        task.metrics(EvalResult(loss=0.5, tokens=5, statistics=tuple(found.tolist())))


NUMBERS = {
    "multi_label": [["a"], [], ["b", "a"], [1]],
    "regression": [-100, 0.5, "3", -1e4],
    "relevance": [0, 1, 0.25, True],
}


def of_problem(tmp_path, problem_type: str, values=None, **data):
    rows = [{"text": f"ab {n}", "label": label} for n, label in enumerate(values or NUMBERS[problem_type])]
    recipe = made(tmp_path, rows, **data)
    return registry.load_task(recipe.model_copy(update={"classify": Classify(problem_type=problem_type)}))


@pytest.mark.parametrize("problem_type", NUMBERS)
def test_scores_and_padding_of_other_problems(problem_type, tmp_path):
    """A label of -100 is a number as any other, and rows that fill a batch do not count."""
    task = of_problem(tmp_path, problem_type, **({"labels": ("a", "b")} if problem_type == "multi_label" else {}))
    expected = torch.tensor([[float(label)] for label in NUMBERS[problem_type] if not isinstance(label, list)])
    expected = torch.tensor([[1.0, 0], [0, 0], [1, 1], [0, 1]]) if problem_type == "multi_label" else expected
    logits = torch.full((3, expected.shape[1]), 0.5)
    reference = torch.nn.MSELoss() if problem_type == "regression" else torch.nn.BCEWithLogitsLoss()
    batches = list(EvaluationBatches(task.train, 3, (0, 1)))
    assert [task.count(**batch.targets) for batch in batches] == [3, 1]
    scores = torch.cat([batch.targets["scores"].view(3, -1) for batch in batches])
    assert torch.equal(scores[:4], expected)
    losses = [task.loss(logits, **batch.targets) for batch in batches]
    torch.testing.assert_close(sum(losses) / 4, reference(torch.full_like(expected, 0.5), expected))
    padded = MicroBatch(batches[0].inputs, batches[0].targets).padded(3, 5).targets
    torch.testing.assert_close(task.loss(torch.full((5, expected.shape[1]), 0.5), **padded), losses[0])


def test_metrics_of_other_problems(tmp_path):
    rng = np.random.default_rng(0)
    truth, guesses = rng.normal(3, 2, 5), rng.normal(3, 2, 5)
    task = of_problem(tmp_path, "regression", truth.tolist())
    task.splits = task.splits.__class__(task.train, task.train, 0, {})
    scores = torch.as_tensor(task.train[np.arange(5)].targets["scores"])
    sums = task.statistics(torch.tensor(guesses)[:, None], torch.zeros(5), scores)
    metrics = task.metrics(EvalResult(loss=0.5, tokens=5, statistics=tuple(sums.tolist())))
    assert metrics["eval_pearson"] == pytest.approx(np.corrcoef(truth, guesses)[0, 1], abs=1e-6)
    assert metrics["eval_mae"] == pytest.approx(np.abs(truth - guesses).mean(), rel=1e-6)
    task = of_problem(tmp_path, "multi_label", [["a"], ["b"], [], ["a", "b"]])
    task.splits = task.splits.__class__(task.train, task.train, 0, {})
    guessed = torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, -1.0], [1.0, -1.0]])  # a: 2 of 3 right; b: never
    scores = torch.as_tensor(task.train[np.arange(4)].targets["scores"])
    sums = task.statistics(guessed, torch.zeros(4), scores)
    metrics = task.metrics(EvalResult(loss=0.5, tokens=4, statistics=tuple(sums.tolist())))
    assert (metrics["eval_accuracy"], metrics["eval_f1"]) == (0.5, pytest.approx((2 * 2 / (3 + 2) + 0) / 2))


@pytest.mark.parametrize(
    ("problem_type", "label", "text"),
    [
        ("multi_label", "a", "'label' is 'a', not a list of classes; write one"),
        (
            "multi_label",
            [0, 0],
            r"'label' is \[0, 0\], with a class twice; write the name or number of each class once",
        ),
        ("multi_label", ["a", 0], r"'label' is \['a', 0\], with a class twice"),
        ("multi_label", ["c"], "'label' is 'c', which is not one of the classes a, b"),
        ("regression", "much", "'label' is 'much', not a number; correct"),
        ("relevance", 1.5, "'label' is 1.5, not a number from 0 to 1"),
        ("relevance", None, "'label' is None, not a number from 0 to 1"),
    ],
)
def test_labels_that_are_no_scores(problem_type, label, text, tmp_path):
    with pytest.raises(DataError, match=text):
        of_problem(tmp_path, problem_type, [label], labels=("a", "b"))


def test_evaluation_counts_each_row_once(tmp_path):
    task = registry.load_task(made(tmp_path, ROWS + ROWS[:1]))
    for size in (1, 2, 3):
        shards = [EvaluationBatches(task.train, 2, (rank, size)) for rank in range(size)]
        assert sum(task.count(**batch.targets) for shard in shards for batch in shard) == 5


A, B = {"text": "ab", "label": "no"}, {"text": "ba", "label": "yes"}
BAD = [
    ([A, B, {"text": "ab"}], {}, ("T/rows.jsonl:3", "no column 'label'", "found: text", "add it, or remove the row")),
    ([A, {"txt": "ab", "label": "no"}], {}, ("T/rows.jsonl:2", "no column 'text'", "found: txt, label", "add it, or remove the row")),
    ([A, {**B, "text": 3}], {}, ("T/rows.jsonl:2", "'text'", "3", "not text", "correct or remove the row")),
    ([A, {**B, "text": " "}], {}, ("T/rows.jsonl:2", "'text'", "empty", "fill or remove the row")),
    ([A, {**B, "label": None}], {}, ("T/rows.jsonl:2", "'label'", "None", "a name or a whole number", "correct or remove the row")),
    ([A, {**B, "label": 0.5}], {}, ("T/rows.jsonl:2", "'label'", "0.5", "a name or a whole number")),
    ([A, {**B, "label": -1}], {}, ("T/rows.jsonl:2", "'label'", "-1", "from 0", "data.labels")),
    ([A, {**B, "label": 2}], {"labels": ("no", "yes")}, ("T/rows.jsonl:2", "'label'", "2", "from 0 to 1", "data.labels")),
    ([A, {**B, "label": "yse"}], {"labels": ("no", "yes")}, ("T/rows.jsonl:2", "'label'", "'yse'", "classes no, yes", "data.labels")),
    ([{**A, "label": 0}, {**B, "label": 5}], {}, ("T/rows.jsonl:2", "label is 5", "label 1", "from 0 without a gap", "data.labels")),
    ([{**A, "label": 0}, B], {}, ("T/rows.jsonl", "numbers (0", "T/rows.jsonl:1", "names ('yes'", "T/rows.jsonl:2")),
    ([A, A], {}, ("T/rows.jsonl", "label 'no'", "two classes", "data.labels")),
    (["{"], {}, ("T/rows.jsonl:1", "JSON at column 2")),
    ([], {}, ("T/rows.jsonl", "no rows", "one text and its label")),
    ([A, B], {"text_pair_column": "other"}, ("T/rows.jsonl", "T/rows.jsonl:1", "no column 'other'", "found: text, label", "name the columns with", "data.text_pair_column")),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "data", "row"), BAD)
def test_what_cannot_be_used_is_told_with_its_place(tmp_path, rows, data, row):
    with pytest.raises(DataError) as caught:
        registry.load_task(made(tmp_path, rows, **data))
    check_message(str(caught.value).replace(str(tmp_path), "T"), *row)


def test_the_standard_library_is_data_to_classify(tmp_path):
    recipe = made(tmp_path, tokenizer={"vocabulary_size": 300}, path="builtin:python-modules")
    task = registry.load_task(recipe)
    counts = np.bincount(task.train.stream.labels)
    assert task.names == PACKAGES and len(counts) == len(PACKAGES)
    assert counts.min() > 50 and counts.max() <= 200


SPECIAL, MASK, WORDS = (0, 1), 1, 50


def texts_to_mask(num_texts=400, length=30) -> np.ndarray:
    body = np.random.default_rng(0).integers(2, WORDS, (num_texts, length))
    body[:, 0] = 0  # as a [CLS] would be
    return body


def masked_rows(num_texts=400, length=30) -> MaskedRows:
    body = texts_to_mask(num_texts, length)
    offsets = np.arange(num_texts + 1) * length
    return MaskedRows(TokenStream(body.ravel(), offsets, "s"), 16, 0, Masking(MASK, WORDS, SPECIAL))


def test_fifteen_per_cent_are_hidden_and_of_these_ten_stay_and_ten_are_random():
    rows = masked_rows()
    whole = np.pad(texts_to_mask(), ((0, 0), (0, 2))).reshape(-1, 16)  # rows of 16 and 14 tokens of each text
    arrays = rows[np.arange(len(rows))]
    ids, labels, mask = arrays.inputs["input_ids"], arrays.labels, arrays.inputs["attention_mask"]
    chosen = labels != -100
    assert not chosen[(mask == 0) | (whole == 0)].any()
    assert (labels[chosen] == whole[chosen]).all() and (ids == whole)[~chosen & (mask == 1)].all()
    candidates = ((mask == 1) & (whole != 0)).sum()
    assert chosen.sum() / candidates == pytest.approx(0.15, abs=0.01)
    assert (ids[chosen] == MASK).mean() == pytest.approx(0.8 + 0.1 / WORDS, abs=0.03)
    assert (ids[chosen] == whole[chosen]).mean() == pytest.approx(0.1 + 0.1 / WORDS, abs=0.02)
    assert rows.num_targets == chosen.sum()


def test_a_long_text_goes_on_in_the_next_row_and_nothing_is_lost():
    rows = masked_rows(num_texts=2)
    arrays = rows[np.arange(len(rows))]
    ids, mask = arrays.inputs["input_ids"], arrays.inputs["attention_mask"]
    whole = np.where(arrays.labels == -100, ids, arrays.labels)  # what is hidden is in the labels
    assert rows.sizes.tolist() == [16, 14, 16, 14] and mask.sum() == 60
    assert whole[mask == 1].tolist() == rows.stream.tokens.tolist()


def test_what_is_hidden_depends_on_the_position_and_on_nothing_else(tmp_path):
    rows = masked_rows(num_texts=10)
    batch = made(tmp_path).batch.model_copy(update={"global_batch_size": 4})
    alone = StepBatches(rows, 3, batch.model_copy(update={"micro_batch_size": 4}), (0, 1), 20)
    for step in (0, 7):
        (whole,) = alone.at(step)
        shards = [m for rank in range(2) for m in StepBatches(rows, 3, batch, (rank, 2), 20, start_step=5).at(step)]
        assert torch.equal(torch.cat([m.labels for m in shards]), whole.labels)
        assert torch.equal(torch.cat([m.inputs["input_ids"] for m in shards]), whole.inputs["input_ids"])
    epochs = [rows.drawn(np.array([0]), np.array([place]), 3).labels for place in (0, len(rows))]
    assert (epochs[0] != epochs[1]).any()
    assert (rows.drawn(np.array([0]), np.array([0]), 4).labels != epochs[0]).any()


def test_a_pretrained_base_gets_a_new_head_and_the_rest_from_the_file(tmp_path):
    classify = made(tmp_path)
    task = registry.load_task(classify)
    config = AutoConfig.for_model(**BERT, vocab_size=task.vocabulary_size)
    folder = tmp_path / "base"
    BertForMaskedLM(config).save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    recipe = made(tmp_path, model={"path": str(folder)}, tokenizer={"path": str(folder)})

    def filled() -> dict:
        shape = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
        assert type(shape).__name__ == "BertForSequenceClassification" and shape.num_labels == 2
        found = {}
        weights.load_weights(shape, recipe, lambda name, tensor: found.update({name: tensor.clone()}))
        return found

    found, stored = filled(), BertForMaskedLM.from_pretrained(folder).state_dict()
    shared = found.keys() & stored.keys()
    assert len(shared) > 30 and all(torch.equal(found[name], stored[name]) for name in shared)
    new = {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert new <= found.keys() - stored.keys()
    assert found["classifier.weight"].std() == pytest.approx(0.02, rel=0.3)
    assert torch.equal(found["classifier.weight"], filled()["classifier.weight"])
    reference = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    assert dict(reference.named_parameters()).keys() <= found.keys()


def test_a_missing_layer_of_the_base_is_no_new_head(tmp_path):
    task = registry.load_task(made(tmp_path))
    folder = tmp_path / "base"
    base = BertForMaskedLM(AutoConfig.for_model(**BERT, vocab_size=task.vocabulary_size))
    base.save_pretrained(folder)
    kept = {name: t.clone() for name, t in base.state_dict().items() if "layer.1.output" not in name}
    save_file({name: t for name, t in kept.items() if "decoder" not in name}, folder / "model.safetensors")
    recipe = made(tmp_path, model={"path": str(folder)})
    shape = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    with pytest.raises(ConfigurationError, match="holds no tensor for bert.encoder.layer.1.output"):
        weights.load_weights(shape, recipe, lambda name, tensor: None)


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("mlm", {**BERT, "model_type": "llama", "num_key_value_heads": 2}, "llama is not a masked language model; choose an encoder"),
        ("pretrain", {**BERT, "model_type": "roberta", "is_decoder": True}, "roberta numbers positions from behind its padding token"),
        ("pretrain", {**BERT, "model_type": "gemma3_text", "use_bidirectional_attention": True}, "attention is True, so every position sees"),
        ("mlm", {**BERT, "is_decoder": True}, "is_decoder is true, which hides the tokens after a masked one"),
        ("mlm", {**BERT, "model_type": "roberta", "max_position_embeddings": 8}, "roberta uses those from [1-9] on; use at most [1-7]$"),
    ],
)  # fmt: skip
def test_models_that_do_not_fit_the_task(tmp_path, task, config, message):
    recipe = made(tmp_path, task=task, model={"config": config})
    loaded = registry.load_task(recipe)
    with pytest.raises(ConfigurationError, match=message):
        build_skeleton(recipe, loaded.vocabulary_size, loaded.special_tokens, loaded.head)


@pytest.mark.parametrize(("task", "token"), [("mlm", "mask_token"), ("classify", "pad_token")])
def test_a_tokenizer_has_to_have_the_tokens_that_the_task_needs(tmp_path, task, token):
    tokenizer = registry.load_task(made(tmp_path, task=task)).tokenizer
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields.pop(token)
    config.write_text(json.dumps(fields))
    assert getattr(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), token) is None
    with pytest.raises(DataError, match=f"no {token}"):
        registry.load_task(made(tmp_path, task=task, tokenizer={"path": str(tmp_path / "tokenizer")}))


@pytest.fixture
def no_pad(tmp_path) -> str:
    """A decoder's tokenizer, as many are: it names no token that pads."""
    tokenizer = registry.load_task(made(tmp_path)).tokenizer
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer").pad_token is None
    return str(tmp_path / "tokenizer")


def test_a_decoder_without_a_pad_token_classifies(tmp_path, no_pad):
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    recipe = made(
        tmp_path,
        model={"config": {**llama, "num_attention_heads": 2}},
        tokenizer={"path": no_pad, "pad_token": "<|end_of_text|>"},
    )
    task = registry.load_task(recipe)
    task.tokenizer.save_pretrained(tmp_path / "export")
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (exported.pad_token, len(exported)) == ("<|end_of_text|>", len(AutoTokenizer.from_pretrained(no_pad)))
    shape = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    assert shape.config.pad_token_id == exported.pad_token_id == exported.eos_token_id
    torch.manual_seed(0)
    reference = AutoModelForSequenceClassification.from_config(shape.config).eval()
    arrays = task.train[np.arange(4)]
    assert (arrays.inputs["attention_mask"].sum(axis=1) < 8).any()
    with torch.no_grad():
        padded = reference(**{name: torch.from_numpy(array) for name, array in arrays.inputs.items()}).logits
        for index, row in enumerate(ROWS):
            ids = torch.tensor([exported(row["text"], truncation=True, max_length=8)["input_ids"]])
            torch.testing.assert_close(padded[index], reference(ids).logits[0])


def test_what_cannot_pad(tmp_path, no_pad):
    with pytest.raises(DataError, match="not at the end: or its eos_token if no text ends with it"):
        registry.load_task(made(tmp_path, tokenizer={"path": no_pad}))
    tokenizer = AutoTokenizer.from_pretrained(no_pad)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>"]})
    tokenizer.save_pretrained(tmp_path / "spare")
    with pytest.raises(DataError, match=r"for example tokenizer.pad_token='<\|reserved_0\|>'"):
        registry.load_task(made(tmp_path, tokenizer={"path": str(tmp_path / "spare")}))
    with pytest.raises(
        ConfigurationError, match='tokenizer.pad_token: found "<pad>" .text., which is not a token of .*;'
    ):
        registry.load_task(made(tmp_path, tokenizer={"path": no_pad, "pad_token": "<pad>"}))


@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "reward", "classify", "mlm", "embed"])
def test_rows_of_like_length_by_option(tmp_path, task):
    """Of every task that pads. How such rows are sorted is tested where they are made."""
    draw = random.Random(0)
    rows = []
    for n in range(64):
        one, other = ("a b " * draw.randint(1, 9) for _ in range(2))
        texts = {"prompt": f"{n}", "text": one, "anchor": f"{n}", "positive": one, "completion": one}
        rows.append({**texts, "chosen": one, "rejected": f"{other} c", "label": n % 2})
    plain, grouped = (
        registry.load_task(recipe.model_copy(update={"batch": Batch(global_batch_size=2, sequence_length=64)})).train
        for recipe in (
            made(tmp_path, rows, task, group_by_length=wanted, ignore_columns=tuple(unread(task, rows[0])))
            for wanted in (False, True)
        )
    )
    assert isinstance(grouped, LengthGroups) and not isinstance(plain, LengthGroups)
    assert isinstance(grouped, type(plain)) and grouped.global_batch_size == 2
    assert len(grouped) == len(plain) > 2 and grouped.fingerprint != plain.fingerprint


def test_labelled_rows_that_fill_up_an_evaluation_count_nowhere():
    rows = LabelledRows(TokenStream(np.arange(3), np.arange(4), "s", labels=np.array([0, 1, 0])), 4, 0)
    assert [batch.labels.tolist() for batch in EvaluationBatches(rows, 2, (1, 2))] == [[0, -100]]
