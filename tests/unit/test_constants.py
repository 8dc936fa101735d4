"""Constants in buffers and frozen weights: a step leaves them, a run reads them with the weights and exports them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from test_export import tokenizer
from test_weights import filled, recipe
from tiny_families import CONSTANTS, round_trip_config, tiny_config
from transformers import AutoModelForCausalLM

from samecurve.checkpoint.resume import refusals
from samecurve.config.schema import Recipe
from samecurve.export.hf_export import ExportTarget, export
from samecurve.models import pretrained
from samecurve.models.lora import trained_shapes
from samecurve.models.pretrained import constants
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weight_files import weight_files
from samecurve.models.weights import constant_tensors, describe, load_weights
from samecurve.run.metadata import resume_identity
from samecurve.specs.heads import CAUSAL
from samecurve.training.startup import build_model

IDS = torch.arange(3, 23)[None]


def change(model) -> None:
    for name in constants(model):
        buffer = model.state_dict()[name]
        if buffer.is_floating_point():
            buffer.add_(0.1 * torch.rand_like(buffer))
        else:
            buffer.add_(1).remainder_(model.config.n_routed_experts)  # the experts of each token


@pytest.fixture(params=CONSTANTS)
def stored(request, tmp_path):
    """A pretrained folder whose constants are not those of a new model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(round_trip_config(request.param), dtype=torch.float32)
    change(model)
    model.save_pretrained(tmp_path / "base")
    return model, tmp_path / "base"


def test_a_training_step_leaves_constants(stored):
    model, _ = stored
    before = {name: model.state_dict()[name].clone() for name in constants(model)}
    assert before
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    assert model(input_ids=IDS, labels=IDS).loss != loss
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_constants_are_read_and_exported(stored, tmp_path):
    model, folder = stored
    made = recipe(path=str(folder), attention="eager")
    skeleton = build_skeleton(made, 100)
    tensors = filled(made, skeleton)
    for name in constants(model):
        assert torch.equal(tensors[name], model.state_dict()[name]), name
    parameters = [(name, tensors[name]) for name in trained_shapes(skeleton)]
    target = ExportTarget(tmp_path / "model", tokenizer())
    export(iter([*parameters, *constant_tensors(skeleton, made)]), skeleton, target, True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_a_run_resumes_with_the_same_constants_only(stored, monkeypatch):
    model, folder = stored
    content = {"task": "pretrain", "output_dir": "x", "steps": 1, "model": {"path": str(folder)}}
    content |= {"data": {"path": "x", "packing": False}, "optimizer": {"learning_rate": 1e-3}}
    made = Recipe.model_validate(content | {"batch": {"global_batch_size": 1, "sequence_length": 16}})
    plan = SimpleNamespace(recipe=made, from_strategy={}, strategy=SimpleNamespace(name="single", world_size=1))
    rows = SimpleNamespace(fingerprint="x", shares=())
    task = SimpleNamespace(train=rows, validation=None, vocabulary_size=100, origin="", has_reference=False)
    task.special_tokens, task.head = None, CAUSAL
    counted = Mock(side_effect=weight_files)
    monkeypatch.setattr(pretrained, "weight_files", counted)
    built = build_model(SimpleNamespace(recipe=made, plan=plan), task)
    describe(built.skeleton, made)
    load_weights(built.skeleton, made, lambda name, tensor: None)
    assert counted.call_count == 1  # of all headers
    before = built.identity
    assert all(torch.equal(built.constants[name], model.state_dict()[name]) for name in constants(model))
    assert refusals({**before, "step": 0}, before) == []
    change(model)
    model.save_pretrained(folder)
    after = resume_identity(plan, build_skeleton(made, 100), task)
    (reason,) = refusals({**before, "step": 0}, after)
    assert reason.startswith("model.constants: ")


def test_a_new_model_has_the_familys_constants():
    """Not of apertus, whose activations' parameters transformers sets in no rule of their own."""
    fields = tiny_config("gemma4_text").to_diff_dict() | {"model_type": "gemma4_text"}
    made = recipe(fields)
    skeleton = build_skeleton(made, 100)
    tensors = filled(made, skeleton)
    assert len(constants(skeleton)) == 2
    assert all(torch.equal(tensors[name], torch.ones(1)) for name in constants(skeleton))
