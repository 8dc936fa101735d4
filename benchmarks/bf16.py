"""Bytes and copies of bf16 training that a CPU can count, with and without what saves them, as a page."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import commit
from benchmarks.markdown import table
from samecurve.config.schema import Adapter, Memory
from samecurve.models import bf16_copies, fp32_weights, lora
from samecurve.models.activation_checkpointing import checkpoint_layers, layers
from samecurve.specs.environment import version

TOKENS = 512
SHAPE = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4)).train()


def pass_through(model: nn.Module) -> None:
    ids = torch.arange(TOKENS).remainder(SHAPE["vocab_size"])[None]
    model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()


def kept_bytes(copies: bool) -> tuple[int, int]:
    """Bytes that are kept for the backward pass: (of activations, of copies of weights), each storage once."""
    model = llama()
    if copies:
        bf16_copies.install_in_layers(model)
        bf16_copies.install_around(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.shape for parameter in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    found: dict[int, tuple[int, bool]] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held.append(tensor)  # a storage that is freed could give its address to another one
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes(), tensor.shape in shapes
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=not copies)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        pass_through(model)
    sums = [sum(size for size, is_weight in found.values() if is_weight is kind) for kind in (False, True)]
    return sums[0], sums[1]


def frozen_bytes(store: bool) -> int:
    """Bytes of the weights that an adapter leaves alone."""
    model, adapter = llama(), Adapter(name="lora", rank=8)
    lora.inject(model, adapter)
    if store:
        recipe: Any = SimpleNamespace(precision="bf16", adapter=adapter)
        fp32_weights.store_frozen_in_bf16(model, recipe, everywhere=True)
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)


def random_states(preserve: bool) -> int:
    """Copies of the random state in a forward and a backward pass over recomputed layers."""
    model = llama()
    if preserve:
        for layer in layers(model):
            plain = layer.forward
            layer.forward = lambda *args, plain=plain, **kwargs: checkpoint(plain, *args, use_reentrant=False, **kwargs)
    else:
        checkpoint_layers(model, Memory(activation_checkpointing="full"))
    with (
        mock.patch("torch.get_rng_state", wraps=torch.get_rng_state) as read,
        mock.patch("torch.set_rng_state", wraps=torch.set_rng_state) as written,
    ):
        pass_through(model)
    return read.call_count + written.call_count


def page() -> str:
    before, after = kept_bytes(copies=False), kept_bytes(copies=True)
    rows = [
        ["B1", "activations kept for the backward pass, MB", *(f"{each[0] / 1e6:.1f}" for each in (before, after))],
        ["B1", "bf16 copies of weights kept with them, MB", *(f"{each[1] / 1e6:.1f}" for each in (before, after))],
        ["B10", "frozen weights under LoRA, MB", *(f"{frozen_bytes(each) / 1e6:.2f}" for each in (False, True))],
        ["B12", "copies of the random state", *(str(random_states(each)) for each in (True, False))],
    ]
    shape = ", ".join(f"{key} {value}" for key, value in SHAPE.items())
    return f"""# What bf16 training keeps and copies

Counted on {date.today()} at {commit("benchmarks/bf16.md")} by `python scripts/bench_bf16.py` on a CPU;
torch {version("torch")}, transformers {version("transformers")}.
A Llama ({shape}) passes one row of {TOKENS} tokens forward and backward. The letters are those of
[GPUs](../docs/gpu.md). Before B1: autocast over fp32 weights; after: bf16 copies of them. Before B12:
`torch.utils.checkpoint` as it is, with all layers recomputed.

{table(["", "", "before", "after"], rows)}
"""
