"""Tiny models with Liger's kernels against the same ones with PyTorch's. Prints JSON.

Run in a process of its own, on a GPU where there is one, else by Triton's interpreter.
"""

from __future__ import annotations

import interpreted  # isort: skip  # before anything that imports Triton

import copy
import json
import sys

import pytest
import torch
from tiny_families import tiny_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config.schema import Adapter, Memory
from samecurve.errors import ConfigurationError
from samecurve.losses.chunked_cross_entropy import TokenSums, chunked_sums, trained_positions
from samecurve.losses.cross_entropy import IGNORE_INDEX, token_loss_sum
from samecurve.models import liger, lora
from samecurve.models.activation_checkpointing import checkpoint_layers

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MATMUL = Memory(activation_checkpointing="selective")
MEMORIES = {
    "full": Memory(activation_checkpointing="full"),
    "attention": Memory(activation_checkpointing="selective", selective_save="attention"),
    "matmul": MATMUL,
}


def main() -> None:
    """With names of families as arguments those alone are compared."""
    interpreted.prepare()
    torch.set_default_device(interpreted.DEVICE)
    if sys.argv[1:]:
        print("FOUND " + json.dumps({family: in_family(family) for family in sys.argv[1:]}))
        return
    # all are made before Liger changes the classes, too
    plain = {family: tiny(family) for family in ("llama", "qwen3", "gemma")}
    plain["llama adapted"] = tiny("llama")
    lora.inject(plain["llama adapted"], Adapter(name="lora", rank=4))
    others = {"gelu": tiny("llama", hidden_act="gelu"), "silu": tiny("nemotron", hidden_act="silu")}
    expected = {name: gradients(model) for name, model in plain.items()}
    found = {}
    for name, model in plain.items():
        liger.replace(model, "liger")
        found[name] = compared(gradients(model), expected[name]) | {"replaced": liger.replaced(model)}
    for kind, memory in MEMORIES.items():
        model = copy.deepcopy(plain["llama"])
        checkpoint_layers(model, memory)
        found[kind] = compared(gradients(model), expected["llama"])
    for trained in ("all", "some", "none"):
        found[f"loss, {trained}"] = compared(*(head_gradients(kind, trained) for kind in ("liger", "full")))
    for name, model in others.items():
        with pytest.raises(ConfigurationError) as error:
            liger.replace(model, "liger")
        found[name] = str(error.value)
    print("FOUND " + json.dumps(found))


def in_family(family: str) -> dict:
    model = prepared(AutoModelForCausalLM.from_config(tiny_config(family)))
    expected = gradients(model)
    liger.replace(model, "liger")
    return compared(gradients(model), expected) | {"replaced": liger.replaced(model)}


def tiny(family: str, **fields) -> nn.Module:
    torch.manual_seed(0)
    return prepared(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **fields)))


def prepared(model: nn.Module) -> nn.Module:
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones and zeros would hide a weight that is not applied
            nn.init.normal_(parameter, 1.0, 0.3)
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, and the loss. Two rows with positions of their own, as packed documents have."""
    ids = torch.arange(12).reshape(2, 6) * 7 % 50
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]])
    loss = token_loss_sum(model(input_ids=ids, position_ids=positions).logits, ids)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found | {"loss": loss.detach()}


def head_gradients(kind: str, trained: str) -> dict[str, torch.Tensor]:
    """Of an output head with a bias and what comes into it, scaled as an engine does."""
    torch.manual_seed(0)
    head, states = nn.Linear(32, 70), torch.randn(2, 9, 32, requires_grad=True)
    labels = torch.randint(0, 70, (2, 9))
    if trained != "all":
        labels[:, 5 if trained == "some" else 0 :] = IGNORE_INDEX
    if kind == "full":
        loss = token_loss_sum(head(states), labels)
    else:
        wanted = TokenSums(token_loss_sum, {"labels": labels}, trained_positions(labels))
        loss = chunked_sums(states, head, wanted, kind)
    (loss * 0.01).backward()
    return {"loss": loss.detach(), "states": states.grad, "weight": head.weight.grad, "bias": head.bias.grad}


def compared(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict:
    """The largest relative L2 difference of a gradient, and that of the loss."""
    assert found.keys() == expected.keys()
    differences = {
        name: float((found[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in expected.items()
    }
    return {"loss": differences.pop("loss"), "gradients": max(differences.values()), "value": float(found["loss"])}


if __name__ == "__main__":
    main()
