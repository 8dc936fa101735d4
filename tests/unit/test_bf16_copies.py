"""bf16 copies of fp32 weights: FSDP2's mixed precision bit for bit, without shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config.schema import Adapter, Memory
from samecurve.models import bf16_copies, fp32_weights, lora
from samecurve.models.activation_checkpointing import checkpoint_layers, layers

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
MAMBA2 = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}
MAMBA2 |= {"chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN3_NEXT = {**LLAMA, **DELTA, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
QWEN3_NEXT |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
QWEN3_NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
RECURRENT = {"mamba2": MAMBA2, "qwen3_next": QWEN3_NEXT}
FAMILIES = {"llama": LLAMA, "tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2, **RECURRENT}
FAMILIES |= {"olmo2": LLAMA}  # its rotary angles stay fp32


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(family: str = "llama", adapter: Adapter | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama" if family == "tied" else family, vocab_size=64, **FAMILIES[family])
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
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = fp32_weights.parameters(model, "bf16")
    for each in [*layers(model), model]:
        fully_shard(each, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy, ignored_params=whole)
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


@pytest.mark.parametrize(
    "checkpointing", ["selective", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("none", "full"))]
)
def test_compiled_layers_compute_the_same(checkpointing):
    torch._dynamo.reset()
    model, backend = with_copies(build(), checkpointing), CompileCounter()
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    assert_equal(curve(model), curve(with_copies(build())))
    assert backend.frame_count == 1


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


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrence_is_computed_with_unrounded_weights(family):
    model, seen = with_copies(build(family)), {}
    kept = fp32_weights.names(model, "bf16")
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "dt_bias"} | ({"D"} if family == "mamba2" else set())
    for name in kept:
        path, _, own = name.rpartition(".")
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, args, name=name, own=own: seen.update({name: getattr(module, own).detach().clone()})
        )
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in kept:
            weights[name].add_(1e-4)  # 1 and its neighbour above are 8e-3 apart in bf16
    model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    assert seen.keys() == kept and all(torch.equal(seen[name], weights[name]) for name in kept)


@pytest.mark.parametrize("steps", [pytest.param(40), pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_a_recurrence_follows_a_plain_loop(family, steps):
    """A loop with autocast and fp32 weights. What the forward passes see of A_log may differ by a tenth of its path."""
    losses, seen = zip(*(plain_curve(family, steps, copies) for copies in (True, False)), strict=True)
    assert max(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True)) < 1e-2
    for name, first in seen[1][0].items():
        path = (seen[1][-1][name] - first).abs().mean()
        assert (seen[0][-1][name] - seen[1][-1][name]).abs().mean() < 0.1 * path, name


def plain_curve(family: str, steps: int, copies: bool) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses, and the A_log that each step's forward pass sees."""
    model, losses, seen = build(family), [], []
    model = with_copies(model) if copies else model
    for path, module in model.named_modules():
        if "A_log" in module._parameters:
            module.register_forward_pre_hook(
                lambda module, args, path=path: seen[-1].update({path: module.A_log.detach().float().clone()})
            )
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.Generator().manual_seed(1)
    for _ in range(steps):
        seen.append({})
        ids = torch.randint(0, 16, (2, 8), generator=generator).repeat(1, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=not copies):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, seen
