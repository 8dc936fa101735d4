"""distill: the loss by hand and by the definition, its metrics, and teachers that cannot be used."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_recipes import jsonl, make_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.config.schema import Distill, Recipe
from samecurve.errors import ConfigurationError
from samecurve.interfaces.engine import EvalResult
from samecurve.tasks import registry
from samecurve.tasks.distill import DistillTask

ROWS = [{"prompt": f"say {word}", "completion": f"{word} it is"} for word in ("ab", "ba", "abba", "baab")]


def made(tmp_path, teacher="unused", **settings) -> Recipe:
    path, block = jsonl(tmp_path / "rows.jsonl", *ROWS), {"teacher": str(teacher), **settings}
    return make_recipe(tmp_path, path, "distill", tokenizer={"vocabulary_size": 300}, distill=block)


def task(**settings) -> DistillTask:
    recipe = Recipe.model_construct(distill=Distill(teacher="t", **settings))
    return DistillTask(None, None, None, recipe=recipe)


QUARTERS, HALVES = torch.tensor([[1 / 4, 3 / 4]]).log(), torch.tensor([[1 / 2, 1 / 2]]).log()
LABELS = torch.tensor([1])


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        ("forward_kl", 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)),  # of the teacher's 1/2 and 1/2
        ("reverse_kl", 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)),
    ],
)
def test_the_divergence_by_hand(divergence, expected):
    found = task(divergence=divergence).loss(QUARTERS, LABELS, HALVES)
    assert found.item() == pytest.approx(expected)
    both = task(divergence=divergence, label_weight=0.25).loss(QUARTERS, LABELS, HALVES)
    assert both.item() == pytest.approx(0.75 * expected + 0.25 * -math.log(0.75))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_the_divergence_by_its_definition(divergence):
    """Over trained tokens and the ids that both have, with a temperature."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 9)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, :2] = -100
    p, q = ((logits[..., :7] / 3.0).softmax(dim=-1) for logits in (teacher, student))
    p, q = (p, q) if divergence == "forward_kl" else (q, p)
    expected = 9.0 * (p * (p / q).log()).sum(dim=-1)[labels != -100].sum()
    found = task(divergence=divergence, temperature=3.0).loss(student, labels, teacher)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_micro_batch_that_trains_nothing_still_has_a_gradient():
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = task(label_weight=0.5).loss(logits, torch.full((1, 2), -100), torch.randn(1, 2, 3))
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logits.grad, torch.zeros(1, 2, 3))


def teacher(folder, tokenizer, size):
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=size
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_metrics_tell_the_two_losses_apart(tmp_path):
    tokenizer = registry.load_task(made(tmp_path).model_copy(update={"task": "sft"})).tokenizer
    found = registry.load_task(made(tmp_path, teacher(tmp_path / "t", tokenizer, 320), label_weight=0.5))
    assert found.teacher.model.path == str(tmp_path / "t") and found.teacher.model.config is None
    found.splits = replace(found.splits, validation=found.train)
    tokens = found.train.num_targets
    sums = found.statistics(QUARTERS, LABELS, HALVES)
    assert sums.tolist() == pytest.approx([-math.log(0.75), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)])
    metrics = found.metrics(EvalResult(3.0, tokens, (2.0 * tokens, 4.0 * tokens)))
    assert metrics["eval_loss"] == 3.0 and metrics["eval_label_loss"] == 2.0 and metrics["eval_divergence"] == 4.0
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(2.0))


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    tokenizer = registry.load_task(made(tmp_path).model_copy(update={"task": "sft"})).tokenizer
    tokenizer.add_tokens(["more"])
    with pytest.raises(ConfigurationError, match="has other ids for 1 tokens, for example .* for 'more', .* None"):
        registry.load_task(made(tmp_path, teacher(tmp_path / "t", tokenizer, 400)))
