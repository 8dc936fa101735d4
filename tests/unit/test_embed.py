"""embed: rows, loss, gradient and metrics by hand, and every way in which rows or models cannot be used."""

# ruff: noqa: E501 - a message stands in one piece, so that a search for it finds it

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from report_cases import check_message
from safetensors.torch import load_file, save_file
from tiny_recipes import jsonl, make_recipe
from torch.nn import functional
from transformers import AutoConfig, AutoModel, BertForMaskedLM, LlamaConfig

from samecurve.config import loader
from samecurve.config.schema import Embed, Recipe
from samecurve.data import sources
from samecurve.data.datasets.base import grouped
from samecurve.data.datasets.retrieval import RetrievalRows
from samecurve.data.find import find_matches
from samecurve.data.token_store import TokenStream
from samecurve.errors import ConfigurationError, DataError
from samecurve.interfaces.engine import EvalResult
from samecurve.losses import contrastive
from samecurve.metrics.meter import Meter
from samecurve.models import weights
from samecurve.models.skeleton import build_skeleton
from samecurve.run.metadata import resume_identity
from samecurve.tasks import registry
from samecurve.training import settle

BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 64}
ROWS = [{"anchor": f"a{n} " * (n + 1), "positive": f"p{n}", "negative": f"n{n} x", "other": 0} for n in range(4)]


def made(tmp_path, rows=ROWS, **changes) -> Recipe:
    blocks = {"model": {"config": BERT}, "tokenizer": {"vocabulary_size": 300}} | changes
    blocks["data"] = {"packing": False, **changes.get("data", {})}
    blocks.setdefault("batch", {"global_batch_size": 2, "sequence_length": 8})
    return make_recipe(tmp_path, jsonl(tmp_path / "rows.jsonl", *rows), "embed", **blocks)


def test_a_row_is_what_the_tokenizer_makes_of_each_of_its_texts(tmp_path):
    task = registry.load_task(made(tmp_path))
    arrays = task.train[np.array([2, 0])]
    assert arrays.inputs["input_ids"].shape == (2, 3, 8) and arrays.labels.tolist() == [0, 0]
    assert (arrays.inputs["attention_mask"] == arrays.targets["attention_mask"]).all()
    for place, index in enumerate((2, 0)):
        for nth, column in enumerate(("anchor", "positive", "negative")):
            ids = task.tokenizer(ROWS[index][column], truncation=True, max_length=8)["input_ids"]
            kept = arrays.inputs["attention_mask"][place, nth] == 1
            assert arrays.inputs["input_ids"][place, nth][kept].tolist() == ids
    whole = [len(task.tokenizer(row[name])["input_ids"]) for row in ROWS for name in ("anchor", "positive", "negative")]
    assert task.splits.counts["truncated_texts"] == sum(length > 8 for length in whole) and max(whole) > 8
    assert task.describe()["sequences_per_row"] == 3
    assert task.train.num_inputs(np.arange(4)) == sum(arrays_of(task)["attention_mask"].ravel())


@pytest.mark.parametrize("truncation", ["left", "drop"])
def test_long_texts_are_cut_or_left_out_as_asked(truncation, tmp_path):
    task = registry.load_task(made(tmp_path, data={"truncation": truncation}))
    names = ("anchor", "positive", "negative")
    whole = [[len(task.tokenizer(row[name])["input_ids"]) for name in names] for row in ROWS]
    longer = sum(max(lengths) > 8 for lengths in whole)
    if truncation == "drop":
        assert len(task.train) == len(ROWS) - longer and task.splits.counts["too_long_documents"] == longer > 0
        return
    task.tokenizer.truncation_side = "left"
    rows = arrays_of(task)
    for index, row in enumerate(ROWS):
        for nth, name in enumerate(names):
            ids = task.tokenizer(row[name], truncation=True, max_length=8)["input_ids"]
            assert rows["input_ids"][index, nth][rows["attention_mask"][index, nth] == 1].tolist() == ids


def arrays_of(task) -> dict:
    return task.train[np.arange(len(task.train))].inputs


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"negative_10": "x", "negative_2": "y", "negatives": "z"}, ["negative_2", "negative_10"]),
        ({"negative": "x", "negative_1": "y"}, ["negative", "negative_1"]),
        ({"note": "x"}, []),
    ],
)
def test_which_columns_are_negatives(tmp_path, columns, expected):
    task = registry.load_task(made(tmp_path, [{"anchor": f"a{n}", "positive": f"p{n}", **columns} for n in range(2)]))
    assert task.train.num_sequences == 2 + len(expected)
    for nth, column in enumerate(expected, start=2):
        ids = task.tokenizer(columns[column])["input_ids"]
        assert arrays_of(task)["input_ids"][0, nth][: len(ids)].tolist() == ids
    named = {"negative_columns": [], "anchor_column": "positive", "positive_column": "anchor"}
    swapped = registry.load_task(made(tmp_path, ROWS, data=named))
    assert swapped.train.num_sequences == 2 and swapped.train.fingerprint != task.train.fingerprint


def stream(*rows: list[list[int]]) -> TokenStream:
    """rows of texts of tokens"""
    tokens = [token for row in rows for text in row for token in text]
    segments = [nth for row in rows for nth, text in enumerate(row) for _ in text]
    offsets = np.cumsum([0] + [sum(map(len, row)) for row in rows])
    return TokenStream(np.array(tokens, np.uint16), offsets, "s", segments=np.array(segments, np.uint8))


def test_rows_and_their_candidates_by_hand():
    rows = RetrievalRows(stream([[1], [2, 3], [4]], [[5, 6], [4], [2, 3]], [[7], [2], [3]]), 4, padding_token=9)
    ids = rows[np.array([1])].inputs["input_ids"]
    assert ids.tolist() == [[[5, 6, 9, 9], [4, 9, 9, 9], [2, 3, 9, 9]]]
    assert (len(rows), rows.num_targets, rows.num_sequences) == (3, 3, 3)
    assert rows.sizes.tolist() == [2, 2, 1] and rows.num_inputs(np.array([0, 2])) == 4 + 3
    first, second, third = rows.candidates().tolist()
    assert first == second[::-1] and len({*first, *third}) == 4
    by_length = grouped(RetrievalRows)(rows.stream, 4, 9, global_batch_size=2)
    assert by_length.width(np.array([0, 1])) == 4


# anchor and positive are the same in both rows: (1, 0) and (0, 1)
UNIT = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])


def test_the_loss_by_hand():
    """Cosines [[1, 0], [0, 1]] over 0.5 are [[2, 0], [0, 2]]: -log(e^2 / (e^2 + 1)) = log(1 + e^-2) each."""
    found = contrastive.info_nce(UNIT, temperature=0.5)
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(-2))] * 2)
    # a hard negative of one row is a candidate of the other, too: cosines 1, 0, -1, 0 and 0, 1, 0, -1
    negatives = torch.tensor([[[-1.0, 0.0]], [[0.0, -1.0]]])
    found = contrastive.info_nce(torch.cat([UNIT, negatives], dim=1), temperature=1.0)
    e = math.e
    assert found.tolist() == pytest.approx([-math.log(e / (e + 1 + 1 / e + 1))] * 2)


def test_the_context_has_the_loss_and_its_gradient_in_any_number_of_parts(monkeypatch):
    torch.manual_seed(0)
    leaf = functional.normalize(torch.randn(7, 4, 5), dim=-1).requires_grad_()
    losses = contrastive.info_nce(leaf, 0.1)
    losses.sum().backward()
    for anchors in (1024, 3):
        monkeypatch.setattr(contrastive, "_ANCHORS", anchors)
        with torch.no_grad():
            row_loss, gradient = contrastive.info_nce_context(leaf, 0.1)
        torch.testing.assert_close(row_loss, losses.detach())
        torch.testing.assert_close(gradient, leaf.grad)


def test_the_tasks_loss_is_that_of_all_rows_with_its_gradient(tmp_path):
    """Also where the rows come in two parts, and with the tokens' states as what is trained."""
    task = registry.load_task(made(tmp_path))
    torch.manual_seed(0)
    states = torch.randn(12, 8, 6, requires_grad=True)
    mask = torch.from_numpy(arrays_of(task)["attention_mask"]).flatten(0, 1)
    labels = torch.zeros(4, dtype=torch.long)
    pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    whole = contrastive.info_nce(functional.normalize(pooled, dim=-1).reshape(4, 3, 6), 0.05).sum()
    (expected,) = torch.autograd.grad(whole, states)
    context = task.context(task.features(states, labels, mask).detach())
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        texts = slice(3 * rows.start, 3 * rows.stop)
        part = {name: value[rows] for name, value in context.items()}
        loss = task.loss(states[texts], labels[rows], mask[texts], **part)
        assert loss.item() == pytest.approx(context["row_loss"][rows].sum().item())
        total = total + loss
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(total, states)[0], expected)
    assert task.count(labels, mask) == 4


def test_a_row_and_a_queue_have_the_loss_of_moco(tmp_path):
    """Algorithm 1 of arXiv:1911.05722: the positive's key is class 0, before the keys of the queue."""
    task = registry.load_task(
        made(tmp_path, [{"anchor": "a", "positive": "p"}] * 9, embed={"queue": 5, "temperature": 0.07})
    )
    assert task.momentum_queue == (5, 0.999)
    torch.manual_seed(0)
    anchor, positive, key, *queue = functional.normalize(torch.randn(8, 6), dim=-1)
    query, queue = anchor.clone().requires_grad_(), torch.stack(queue)
    logits = torch.cat([(query @ key).reshape(1), query @ queue.T]) / 0.07
    expected = functional.cross_entropy(logits[None], torch.zeros(1, dtype=torch.long))
    expected.backward()
    keys = torch.cat([positive, key])[None]  # the momentum encoder's anchor is not read
    found = task.context(torch.cat([anchor, positive])[None], keys=keys, queue=queue)
    assert found["row_loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(found["gradient"], torch.cat([query.grad, torch.zeros(6)])[None])
    assert torch.equal(found["queued"], key[None])


def test_a_momentum_encoder_is_one_more_forward_pass(tmp_path):
    """A backward pass is worth two. So mfu counts 3; hfu 4, with the one of gradient caching, and 5 with a queue."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, is_main_process=False)
    flops = []
    for queue in (0, 2):
        recipe = made(tmp_path, embed={"queue": queue})
        task = registry.load_task(recipe)
        model = skeleton(recipe, task)
        flops.append(Meter.for_run(recipe, model, accelerator, task, chunked=False).flops)
    once = flops[0]["model_per_token"] / 3
    assert flops[0]["hardware_per_token"] == pytest.approx(4 * once)
    assert flops[1]["hardware_per_token"] == pytest.approx(5 * once)


def test_a_queue_that_would_hold_a_rows_own_positive_is_refused(tmp_path):
    assert registry.load_task(made(tmp_path, embed={"queue": 2})).momentum_queue
    with pytest.raises(
        ConfigurationError, match="embed.queue: found 3, but of 4 training rows a step has 2: .* to 2 or"
    ):
        registry.load_task(made(tmp_path, embed={"queue": 3}))


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [2.0, 3.0]), ("cls", [1.0, 3.0]), ("last", [3.0, 3.0])])
def test_pooling_by_hand(pooling, expected):
    states = torch.tensor([[1.0, 2.0, 3.0, 99.0], [3.0, 99.0, 99.0, 99.0]], dtype=torch.bfloat16)[..., None]
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert contrastive.pool(states, mask, pooling).tolist() == [[value] for value in expected]


def test_metrics_by_hand(tmp_path):
    """Four rows on a circle. The third row's positive is behind one nearer text; the fourth's text is the first's."""
    task = registry.load_task(made(tmp_path, [{"anchor": f"a{n}", "positive": f"p{n % 3}"} for n in range(4)]))
    task.splits = task.splits.__class__(task.train, task.train, 0, {})
    degrees = torch.tensor([[0, 10], [50, 60], [62, 80], [0, 10.0]])
    angles = torch.deg2rad(degrees)
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=-1)
    filled = torch.cat([embeddings, embeddings[:1]]).flatten(1)
    metrics = task.metrics(EvalResult(math.nan, 4, features=filled))
    pairs = [contrastive.info_nce(part, 0.05).mean().item() for part in embeddings.split(2)]
    assert metrics == {
        "eval_loss": pytest.approx(sum(pairs) / 2),
        "eval_accuracy_at_1": 0.75,
        "eval_accuracy_at_5": 1.0,
        "eval_mrr_at_10": pytest.approx((1 + 1 + 1 / 2 + 1) / 4),
        "eval_rows": 4,
    }
    with pytest.raises(DataError, match="5 validation rows were evaluated, but the data have 4"):
        task.metrics(EvalResult(math.nan, 5, features=filled))


def test_what_is_not_a_number_is_behind_all():
    """The second anchor is broken; the others' own texts are the nearest."""
    angles = torch.tensor([[0, 0.1], [math.nan, 0.2], [0.5, 0.4]])
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=-1)
    assert contrastive.ranks(embeddings, np.array([[0], [1], [2]])).tolist() == [1, 4, 1]


def test_a_loss_over_other_batches_is_another_evaluation(tmp_path):
    def evaluation(size: int, **evaluate: object) -> str | None:
        batch = {"global_batch_size": size, "sequence_length": 8}
        recipe = made(tmp_path, ROWS * 2, batch=batch, evaluate=evaluate)
        strategy = SimpleNamespace(name="single", world_size=1)
        plan, task = SimpleNamespace(recipe=recipe, from_strategy={}, strategy=strategy), registry.load_task(recipe)
        return resume_identity(plan, skeleton(recipe, task), task)["evaluation"]

    path = str(jsonl(tmp_path / "held_out.jsonl", *ROWS[:2]))
    assert evaluation(2) is None
    assert evaluation(2, path=path) == evaluation(2, path=path) != evaluation(4, path=path)


A = {"anchor": "a", "positive": "p", "negative": "n"}
BAD = [
    ([A, {"anchor": "b", "negative": "n"}], {}, ("T/rows.jsonl:2", "no column 'positive'", "found: anchor, negative", "add it, or remove the row")),
    ([{"anchors": "b", "positive": "p"}], {}, ("T/rows.jsonl:1", "no column 'anchor'", "found: anchors, positive", "data.anchor_column=anchors")),
    ([A, {"anchor": "b", "positive": "p"}], {}, ("T/rows.jsonl:2", "no column 'negative'", "found: anchor, positive", "add it, or remove the row")),
    ([A, {**A, "negative": None}], {}, ("T/rows.jsonl:2", "'negative'", "None", "not text", "correct or remove the row")),
    ([A, {**A, "anchor": " "}], {}, ("T/rows.jsonl:2", "'anchor'", "empty", "fill or remove the row")),
    ([A, {**A, "negative": "p"}], {}, ("T/rows.jsonl:2", "'positive' and 'negative'", "same text", "correct or remove the row")),
    ([A], {"negative_columns": ["hard"]}, ("T/rows.jsonl:1", "no column 'hard'", "found: anchor, positive, negative", "name the columns with", "data.negative_columns")),
    (["{"], {}, ("T/rows.jsonl:1", "JSON at column 2")),
    ([], {}, ("T/rows.jsonl", "no rows", "one anchor and its positive")),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "data", "row"), BAD)
def test_what_cannot_be_used_is_told_with_its_place(tmp_path, rows, data, row):
    with pytest.raises(DataError) as caught:
        registry.load_task(made(tmp_path, rows, data=data))
    check_message(str(caught.value).replace(str(tmp_path), "T"), *row)


def test_an_anchor_is_on_one_side_only(tmp_path):
    rows = [{"anchor": f"question {n // 5}", "positive": f"answer {n}"} for n in range(100)]
    task = registry.load_task(made(tmp_path, rows, data={"validation_fraction": 0.3}))
    assert len(task.train) % 5 == len(task.validation) % 5 == 0 and len(task.validation) > 0


@pytest.mark.parametrize("folder", ["email", pytest.param("", marks=pytest.mark.full)])
def test_the_standard_library_is_something_to_search_in(folder, tmp_path, monkeypatch):
    files = tuple(path for path in sources.builtin_files() if folder in ("", path.parent.name))
    monkeypatch.setattr(sources, "builtin_files", lambda: files)
    found = list(find_matches("builtin:python-docstrings", made(tmp_path).data).documents())
    texts = [text for match in found for text in match.texts]
    assert len(found) > (50 if folder else 3000) and len(set(texts)) == len(texts)
    for match in found[::100]:
        summary, code = match.texts
        assert ast.get_docstring(ast.parse(code).body[0]) is None and "\n" not in summary


def skeleton(recipe, task):
    return build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)


def test_a_pretrained_base_is_found_under_any_prefix_and_has_no_pooler(tmp_path):
    task = registry.load_task(made(tmp_path))
    config = AutoConfig.for_model(**BERT, vocab_size=task.vocabulary_size)
    for name, stored in (("with_head", BertForMaskedLM(config)), ("bare", AutoModel.from_config(config))):
        folder = tmp_path / name
        stored.save_pretrained(folder)
        recipe = made(tmp_path, model={"path": str(folder)})
        shape, found = skeleton(recipe, task), {}
        weights.load_weights(shape, recipe, lambda name, tensor, found=found: found.update({name: tensor.clone()}))
        expected = dict(AutoModel.from_pretrained(folder, add_pooling_layer=False).named_parameters())
        assert type(shape).__name__ == "BertModel" and found.keys() >= expected.keys()
        assert not any("pooler" in name for name in found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_names_of_the_first_berts_are_known(tmp_path):
    task = registry.load_task(made(tmp_path))
    folder = tmp_path / "old"
    stored = BertForMaskedLM(AutoConfig.for_model(**BERT, vocab_size=task.vocabulary_size))
    stored.save_pretrained(folder)
    file, old = (
        folder / "model.safetensors",
        {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )
    tensors = {name: tensor * 2 for name, tensor in load_file(file).items()}
    for new, known in old.items():
        tensors = {name.replace(new, known): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    recipe, found = made(tmp_path, model={"path": str(folder)}), {}
    weights.load_weights(skeleton(recipe, task), recipe, lambda name, tensor: found.update({name: tensor.clone()}))
    expected = dict(AutoModel.from_pretrained(folder, add_pooling_layer=False).named_parameters())
    assert (found["embeddings.LayerNorm.weight"] == 2).all()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_models_that_do_not_fit(tmp_path):
    fields = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    recipe = made(tmp_path, model={"config": fields})
    with pytest.raises(ConfigurationError, match="t5 is not a model that gives each token of a text a state"):
        skeleton(recipe, registry.load_task(recipe))


def test_what_sentence_transformers_is_told(tmp_path):
    task = registry.load_task(made(tmp_path, embed=Embed(pooling="last").model_dump()))
    task.save_task_files(tmp_path, AutoConfig.for_model(**BERT))
    listed = json.loads((tmp_path / "modules.json").read_text())
    assert [module["path"] for module in listed] == ["", "1_Pooling", "2_Normalize"]
    pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 16
    assert [name for name, used in pooling.items() if used is True] == ["pooling_mode_lasttoken"]
    assert json.loads((tmp_path / "sentence_bert_config.json").read_text())["max_seq_length"] == 8


@pytest.mark.parametrize(
    ("modes", "given", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, [], "cls"),  # bge-base-en-v1.5
        ({"pooling_mode_lasttoken": True}, [], "last"),  # Qwen3-Embedding
        ({"pooling_mode_lasttoken": True}, ["embed.pooling=mean"], "mean"),
        ({"pooling_mode_mean_tokens": True}, [], "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, [], "last"),  # of sentence-transformers 6
        ({"pooling_mode": ["cls"]}, [], "cls"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, [], "mean"),  # of the same direction
        ({"pooling_mode": "max"}, ["embed.pooling=mean"], "mean"),
        (None, [], "mean"),
    ],
)
def test_a_model_goes_on_with_its_own_pooling(modes, given, pooling, tmp_path):
    if modes:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    context, lines = started(tmp_path, *given)
    assert settle.settle_pooling(context).plan.recipe.embed.pooling == pooling
    assert bool(lines) is (pooling != "mean")


@pytest.mark.parametrize(
    "modes",
    [
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False},
    ],
)
def test_another_pooling_is_refused(modes, tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    with pytest.raises(ConfigurationError) as caught:
        settle.settle_pooling(started(tmp_path)[0])
    mode = "max" if "pooling_mode" not in modes else " and ".join(np.atleast_1d(modes["pooling_mode"]))
    check_message(str(caught.value), str(tmp_path), f"1_Pooling/config.json says {mode}", "embed.pooling")


def test_layers_behind_the_pooling_are_refused(tmp_path):
    """LaBSE and EmbeddingGemma have a Dense layer there."""
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [{"idx": n, "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigurationError, match="has Dense behind its pooling"):
        settle.settle_pooling(started(tmp_path)[0])


@dataclass(frozen=True)
class Planned:
    recipe: Any


@dataclass(frozen=True)
class Started:
    """What settle_pooling reads of a Context."""

    plan: Planned
    world: Any
    progress: Any


def started(folder: Path, *keys: str) -> tuple[Any, list[str]]:
    """A context whose model is in a folder, and the lines that it prints."""
    LlamaConfig().save_pretrained(folder)
    lines: list[str] = []
    recipe = loader.load_recipe("recipes/embed.yaml", [f"model={{path: {folder}}}", *keys])
    world, progress = SimpleNamespace(on_main=lambda choose: choose()), SimpleNamespace(log=lines.append)
    return Started(Planned(recipe), world, progress), lines
