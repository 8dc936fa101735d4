"""Frozen weights of linear layers in bf16: half the bytes, and bit for bit what fp32 ones compute under autocast."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.config.schema import Adapter
from samecurve.models import lora
from samecurve.models.fp32_weights import store_frozen_in_bf16

IDS = torch.arange(24).view(2, 12)


def adapted(**fields) -> tuple[LlamaForCausalLM, SimpleNamespace]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    recipe = SimpleNamespace(precision="bf16", adapter=Adapter(name="lora", rank=2, **fields))
    lora.inject(model, recipe.adapter)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    return model, recipe


def step(model: LlamaForCausalLM) -> tuple[Tensor, list[Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def num_bytes(model: LlamaForCausalLM) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if not p.requires_grad and "proj" in name)


def test_half_the_bytes_and_the_same_loss_and_gradients():
    model, recipe = adapted()
    other = copy.deepcopy(model)
    store_frozen_in_bf16(other, recipe)
    assert num_bytes(other) * 2 == num_bytes(model) == 4 * 2 * (4 * 16 * 16 + 3 * 16 * 24)
    loss, gradients = step(model)
    found, others = step(other)
    assert torch.equal(loss, found)
    assert all(torch.equal(one, two) for one, two in zip(gradients, others, strict=True))
    kept = {p.dtype for name, p in other.named_parameters() if p.requires_grad or "norm" in name or "embed" in name}
    assert kept == {torch.float32}


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_under_fsdp_all_frozen_weights_are_and_nothing_changes(world_of_one):
    model, recipe = adapted()
    other = copy.deepcopy(model)
    store_frozen_in_bf16(other, recipe, everywhere=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for each in (model, other):
        for layer in [*each.model.layers, each]:
            fully_shard(layer, mesh=world_of_one, mp_policy=policy)
        loss = each(IDS, labels=IDS).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.to_local() for p in each.parameters() if p.requires_grad)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True)) and len(results[0]) > 8
    assert {p.dtype for p in other.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in other.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(("precision", "dora"), [("fp32", False), ("fp16", False), ("bf16", True)])
def test_elsewhere_they_stay_fp32(precision, dora):
    model, recipe = adapted(dora=dora)
    recipe.precision = precision
    store_frozen_in_bf16(model, recipe)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
