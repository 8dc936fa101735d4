"""What layers keep and what they compute again: against plain layers, and in bytes worked out by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from samecurve.config.schema import Adapter, Memory
from samecurve.errors import ConfigurationError
from samecurve.models import activation_checkpointing, dropout, lora
from samecurve.models.activation_checkpointing import checkpoint_layers, layers, repeated_share
from samecurve.models.activation_offload import Offload, copies_of
from samecurve.models.flops import token_flops

LAYERS, TOKENS, HIDDEN, WIDTH, KEYS, HEADS = 4, 2 * 16, 32, 64, 16, 4
LLAMA = {
    "vocab_size": 50,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
}
BERT = {key: value for key, value in LLAMA.items() if "key_value" not in key}
GPT2 = {"vocab_size": 50, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 16}
FAMILIES = {
    "llama": ("llama", LLAMA, "sdpa"),
    "llama eager": ("llama", LLAMA, "eager"),
    "llama adapted": ("llama", LLAMA, "sdpa"),
    # dropout: what is recomputed has to draw the same masks
    "gpt2": ("gpt2", GPT2, "sdpa"),
    "bert": ("bert", BERT, "sdpa"),
}
KINDS = {
    "every_n_layers": Memory(activation_checkpointing="every_n_layers", every_n_layers=2),
    "matmul": Memory(activation_checkpointing="selective"),
    "attention": Memory(activation_checkpointing="selective", selective_save="attention"),
    "full": Memory(activation_checkpointing="full"),
    "offload": Memory(activation_checkpointing="offload"),
}


def build(family: str = "llama") -> nn.Module:
    model_type, fields, attention = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **fields, attn_implementation=attention)
    torch.manual_seed(0)
    model = (AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM).from_config(config)
    if family == "llama adapted":
        lora.inject(model, Adapter(name="lora", rank=4, dropout=0.1))
    model.config.use_cache = False
    model.keys = dropout.install(model, 0, torch.device("cpu"))
    return model.train()


def forward(model: nn.Module) -> torch.Tensor:
    input_ids = torch.arange(TOKENS).reshape(2, -1)
    with model.keys.micro_batch(SimpleNamespace(inputs={"input_ids": input_ids}, step=1, places=torch.arange(2))):
        return _loss(model, input_ids)


def _loss(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(input_ids=input_ids).logits.flatten(0, 1), input_ids.flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def kept_bytes(model: nn.Module) -> int:
    """Between forward and backward, of all that the forward pass allocated."""
    forward(model).backward()  # what is made once, such as rotary angles' tables
    gc.collect()  # or tensors of earlier tests are freed below
    with profile(profile_memory=True) as seen:
        loss = forward(model)
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in seen.events())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_same_bit_for_bit(family, kind):
    plain, model = build(family), build(family)
    names = [name for name, _ in model.named_parameters()]
    checkpoint_layers(model, KINDS[kind])
    losses = [forward(each) for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    expected_gradients, found = gradients(plain), gradients(model)
    assert list(found) == list(expected_gradients) and len(found) > 8
    assert all(torch.equal(found[name], expected_gradients[name]) for name in found)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_does_not_copy_the_random_state(kind, monkeypatch):
    """On a GPU, four copies between GPU and host per layer."""
    model = build("llama adapted")
    checkpoint_layers(model, KINDS[kind])
    forward(model)  # the first forward pass checks the generators itself
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("the random state was read"))
    forward(model).backward()


def test_bytes_by_hand():
    """fp32, so 4 bytes a value; a layer's input is HIDDEN values a token."""
    kept = {"none": kept_bytes(build())}
    for kind, memory in KINDS.items():
        model = build()
        checkpoint_layers(model, memory)
        kept[kind] = kept_bytes(model)
    attention = HIDDEN + HEADS  # its output, and the softmax's sum of each head
    matmul = attention + HIDDEN + 2 * KEYS + HIDDEN + 2 * WIDTH + HIDDEN  # q, k and v, o, gate and up, down
    assert kept["attention"] - kept["full"] == LAYERS * TOKENS * 4 * attention
    assert kept["matmul"] - kept["full"] == LAYERS * TOKENS * 4 * matmul
    half = (kept["none"] - kept["full"]) / 2
    assert kept["every_n_layers"] - kept["full"] == pytest.approx(half, rel=0.01)  # of four layers, two keep everything
    assert kept["none"] > kept["every_n_layers"] and kept["none"] > kept["matmul"] > kept["attention"] > kept["full"]
    assert kept["offload"] == kept["full"]  # the host is the device here


def test_full_keeps_each_layers_input_alone():
    shallow, deep = build(), build()
    shallow.model.layers = shallow.model.layers[:1]
    for model in (shallow, deep):
        checkpoint_layers(model, KINDS["full"])
    assert kept_bytes(deep) - kept_bytes(shallow) == (LAYERS - 1) * TOKENS * HIDDEN * 4


class NotedCopies:
    """Copies of a pretended device, noted in the order of their start and of their use."""

    def __init__(self):
        self.events: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.events.append(f"out {len(self.shapes)}")
        self.shapes.append(tuple(tensor.shape))
        host = tensor.clone()
        host.number = len(self.shapes) - 1
        return host

    def to_device(self, host: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.events.append(f"back {host.number}")

        def needed() -> torch.Tensor:
            self.events.append(f"wait {host.number}")
            return host

        return needed


@pytest.fixture
def copies(monkeypatch) -> NotedCopies:
    noted = NotedCopies()
    monkeypatch.setattr(activation_checkpointing, "copies_of", lambda device: noted)
    return noted


def test_offloaded_is_each_layers_input_and_nothing_else(copies):
    model = build()
    checkpoint_layers(model, KINDS["offload"])
    forward(model).backward()
    assert copies.shapes == [(2, TOKENS // 2, HIDDEN)] * LAYERS


def test_nothing_is_copied_for_an_empty_tensor():
    """As checkpoint of torch 2.11 saves."""
    copies, empty = NotedCopies(), torch.empty(0, requires_grad=True)
    with Offload().of_layer(copies):
        squared = empty**2
    squared.sum().backward()
    assert copies.events == [] and empty.grad.shape == (0,)


def test_each_layers_input_is_on_its_way_back_while_the_next_layer_computes(copies):
    """The last layer's stays; each other one is fetched as the backward pass comes to the layer behind it."""
    model = build()
    checkpoint_layers(model, KINDS["offload"])
    for module in layers(model):
        module.register_full_backward_pre_hook(lambda *_: copies.events.append("backward"))
    for _ in range(2):  # the second micro-batch has nothing of the first one
        forward(model).backward()
        expected = ["out 0", "out 1", "out 2", "out 3", "backward", "back 2", "backward", "wait 2", "back 1"]
        assert copies.events == [*expected, "backward", "wait 1", "back 0", "backward", "wait 0"]
        copies.events.clear(), copies.shapes.clear()


def test_a_graph_may_be_used_twice(copies):
    plain, model = build(), build()
    checkpoint_layers(model, KINDS["offload"])
    for each in (plain, model):
        loss = forward(each)
        loss.backward(retain_graph=True)
        loss.backward()
    found, expected = gradients(model), gradients(plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_is_copied_on_a_cpu():
    host = copies_of(torch.device("cpu"))
    tensor = torch.ones(2)
    assert host.to_host(tensor) is tensor and host.to_device(tensor)() is tensor


@pytest.mark.parametrize(("kind", "calls"), [("full", 8), ("every_n_layers", 6), ("offload", 8), ("matmul", 8)])
def test_layers_run_again_in_the_backward_pass_and_only_then(kind, calls):
    model, seen = build(), []
    for layer in layers(model):
        # before it, because what is recomputed stops at the last value that is needed
        layer.mlp.register_forward_pre_hook(lambda *_: seen.append(None))
    checkpoint_layers(model, KINDS[kind])
    loss = forward(model)
    assert len(seen) == LAYERS
    loss.backward()
    assert len(seen) == calls
    model.eval()
    forward(model).backward()
    assert len(seen) == calls + LAYERS


@pytest.mark.parametrize(
    ("kind", "attention", "share"),
    [
        ("full", "sdpa", (1.0, 1.0)),
        ("offload", "sdpa", (1.0, 1.0)),
        ("every_n_layers", "sdpa", (0.5, 0.5)),
        ("matmul", "sdpa", (0.0, 0.0)),
        ("matmul", "eager", (0.0, 1.0)),
        ("attention", "sdpa", (1.0, 0.0)),
    ],
)
def test_work_done_twice(kind, attention, share):
    model = build()
    assert repeated_share(KINDS[kind], model, attention) == share
    once, twice = (token_flops(model, 16, full).hardware for full in (0.0, 1.0))
    of_attention = 4 * LAYERS * HIDDEN * 16
    found = token_flops(model, 16, share[0], recompute_attention=share[1]).hardware
    assert found - once == share[0] * (twice - once - of_attention) + share[1] * of_attention


def test_a_model_without_layers_is_told():
    with pytest.raises(
        ConfigurationError,
        match="Sequential has no GradientChe.*memory.activation_checkpointing to none",
    ):
        checkpoint_layers(nn.Sequential(nn.Linear(2, 2)), KINDS["full"])
    checkpoint_layers(nn.Sequential(nn.Linear(2, 2)), Memory())
