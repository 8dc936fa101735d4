"""bf16 copies of fp32 weights: FSDP2's mixed precision bit for bit, without shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config.schema import Adapter, Memory
from samecurve.models import bf16_copies, lora
from samecurve.models.activation_checkpointing import checkpoint_layers, layers

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
FAMILIES = {"llama": LLAMA, "tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2}


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(family: str = "llama", adapter: Adapter | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2" if family == "gpt2" else "llama", vocab_size=64, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    if adapter is not None:
        lora.inject(model, adapter)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, 0, 0.1)
    return model.train()


def with_copies(model: nn.Module, checkpointing: str = "none") -> nn.Module:
    bf16_copies.install_in_layers(model)
    checkpoint_layers(model, Memory(activation_checkpointing=checkpointing))
    bf16_copies.install_around(model)
    return model


def sharded(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in [*layers(model), model]:
        fully_shard(each, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    return model


def curve(model: nn.Module) -> list[Tensor]:
    """Losses of two micro-batches a step, then the last weights."""
    generator = torch.Generator().manual_seed(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(6):
        ids = torch.randint(0, 64, (2, 24), generator=generator)
        logits = model(input_ids=ids, use_cache=False).logits
        losses.append(functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()
        if len(losses) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.detach() for loss in losses] + [getattr(p, "_local_tensor", p).detach() for p in trained]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 6 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_curve_is_that_of_fsdp(family):
    assert_equal(curve(with_copies(build(family))), curve(sharded(build(family))))


def test_an_adapters_curve_is_that_of_fsdp():
    adapter = Adapter(name="lora", rank=2)
    assert_equal(curve(with_copies(build(adapter=adapter))), curve(sharded(build(adapter=adapter))))


@pytest.mark.parametrize("checkpointing", ["full", "selective", "offload"])
def test_recomputed_layers_cast_anew(checkpointing):
    assert_equal(curve(with_copies(build(), checkpointing)), curve(with_copies(build())))


def test_under_ddp_the_curve_is_the_same():
    assert_equal(curve(DistributedDataParallel(with_copies(build()))), curve(with_copies(build())))


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_layers_compute_the_same(checkpointing):
    torch._dynamo.reset()
    model, graphs = with_copies(build(), checkpointing), []

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(module)
        return module.forward

    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    assert_equal(curve(model), curve(with_copies(build())))
    assert len(graphs) == 1


def test_layers_pass_on_bf16_and_weights_stay_fp32():
    seen: list[torch.dtype] = []
    model = with_copies(build())
    for layer in layers(model):
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    curve(model)
    assert set(seen) == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_a_weight_that_is_replaced_is_the_one_that_is_copied():
    model = with_copies(build())
    curve(model)
    head = model.get_submodule("lm_head")
    head.weight = nn.Parameter(torch.zeros_like(head.weight))
    assert head.weight is head._parameters["weight"]
    assert not model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits.any()
