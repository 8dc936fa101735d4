"""Experts of a layer that two ranks share, against the same experts in one process; which strategies are refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiny_families import round_trip_config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from samecurve.accelerator.mesh import Mesh
from samecurve.engines import expert_parallel, tensor_parallel
from samecurve.engines.expert_parallel import Dispatch
from samecurve.errors import ConfigurationError
from samecurve.specs.environment import dated
from samecurve.specs.model_families import families
from samecurve.strategy.parallel_dims import ParallelDims


def config(family: str) -> PreTrainedConfig:
    """A tiny model, with 4 experts in each layer if it has any."""
    found = round_trip_config(family)
    for name in ("num_local_experts", "num_experts"):
        if hasattr(found, name):
            setattr(found, name, 4)
    return found


def tiny(family: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family), experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def experts_of(model: PreTrainedModel) -> nn.Module:
    found = expert_parallel.experts_of(model)
    assert len(found) == model.config.num_hidden_layers
    return next(iter(found.values()))


# experts that each rank's tokens choose; in the second case no token needs the second rank's experts
CHOICES = ([[0, 3], [3, 1], [2, 0]], [[0, 1], [1, 0]]), ([[1, 0]], [[0, 1]])
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def compare(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = Mesh(ParallelDims(dp_shard=2, ep=2), rank, torch.device("cpu"))
    for family, implementation in [*product(sorted(families("expert_parallel")), ["grouped_mm"]), ("mixtral", "eager")]:
        whole, model = tiny(family, implementation), tiny(family, implementation)
        expert_parallel.apply(model, mesh)
        expected, spread = experts_of(whole), experts_of(model)
        assert isinstance(spread.forward, Dispatch) and spread.num_experts == 2
        for chosen in CHOICES:
            compare_experts(rank, expected, spread, [torch.tensor(each) for each in chosen])
    dist.destroy_process_group()


def compare_experts(rank: int, expected: nn.Module, spread: nn.Module, chosen: list[Tensor]) -> None:
    made = torch.Generator().manual_seed(1)
    states = [torch.randn(len(each), 32, generator=made, requires_grad=True) for each in chosen]
    weights = [torch.rand(len(each), 2, generator=made, requires_grad=True) for each in chosen]
    outputs = [expected(*each) for each in zip(states, chosen, weights, strict=True)]
    loss = torch.stack([output.square().sum() for output in outputs]).sum()
    wanted = torch.autograd.grad(loss, [states[rank], weights[rank], *expected.parameters()])
    output = spread(states[rank], chosen[rank], weights[rank])
    close(output, outputs[rank])
    found = torch.autograd.grad(output.square().sum(), [states[rank], weights[rank], *spread.parameters()])
    for gradient, whole in zip(found[:2], wanted[:2], strict=True):
        close(gradient, whole)
    for gradient, whole in zip(found[2:], wanted[2:], strict=True):
        assert isinstance(gradient, DTensor)
        close(gradient.to_local(), whole[2 * rank : 2 * rank + 2])


@pytest.mark.filterwarnings("ignore")
def test_outputs_and_gradients_are_those_of_one_process(tmp_path):
    spawn(compare, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize(
    ("family", "dims", "words"),
    [
        (
            "llama",
            ParallelDims(dp_shard=2, ep=2),
            ("found 2", "a llama has no experts", "mixtral", "configs/fsdp.yaml"),
        ),
        ("granitemoe", ParallelDims(dp_shard=2, ep=2), ("a granitemoe has not been tested", "olmoe")),
        ("mixtral", ParallelDims(dp_shard=3, ep=3), ("found 3", "has 4 experts", "use a size that divides them: 2, 4")),
        ("gpt_oss", ParallelDims(dp_shard=10, ep=2), ("5 processes hold the same 2 experts", "has 32 rows")),
    ],
)
def test_what_cannot_be_spread_is_refused(family, dims, words):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(family))
    with pytest.raises(ConfigurationError) as error:
        expert_parallel.check(model, SimpleNamespace(path="configs/fsdp_ep.yaml", dims=dims))  # pyright: ignore
    for word in (*words, "configs/fsdp_ep.yaml: parallelism_config.parallelism_config_ep_size: found"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("family", "ep", "why"),
    [
        ("gpt_oss", 2, f"{dated('transformers')} has no tensor-parallel plan for the layers of a gpt_oss"),
        (
            "gpt_neox",
            1,
            f"the tensor-parallel plan of a gpt_neox in {dated('transformers')} leaves its embedding whole",
        ),
        ("gpt2", 1, f"{dated('transformers')} has no tensor-parallel plan for the layers of a gpt2"),
        ("granite", 1, "granite has not been tested under tensor parallelism"),
        ("granitemoe", 2, "granitemoe has not been tested under expert and tensor parallelism"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(family, ep, why):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=1))
    dims = ParallelDims(dp_shard=2, tp=2, ep=ep)
    strategy = SimpleNamespace(path="configs/x.yaml", dims=dims, tp_sequence_parallel=False)
    with pytest.raises(ConfigurationError) as error:
        tensor_parallel.check(model, strategy)  # pyright: ignore
    assert f"found 2, but {why}; use " in str(error.value)
    vars(model)["unproven_uses"] = uses = []
    tried = "has not been tested" in why
    with nullcontext() if tried else pytest.raises(ConfigurationError):
        tensor_parallel.check(model, strategy)  # pyright: ignore
    assert [use.split(";")[0] for use in uses] == [f"tensor parallelism of a {family}"] * tried


def test_unproven_experts_are_spread():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config("granitemoe"))
    vars(model)["unproven_uses"] = uses = []
    expert_parallel.check(model, SimpleNamespace(path="x", dims=ParallelDims(dp_shard=2, ep=2)))  # pyright: ignore
    assert [use.split(";")[0] for use in uses] == ["expert parallelism of a granitemoe"]


def test_experts_of_another_dimension_are_sharded_where_they_are_fewer_than_ranks():
    """Of 4 experts two ranks have two each; a second pair shards them whole, four pairs along the next dimension."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config("mixtral"))
    for shards in (2, 4, 8, 16):
        expert_parallel.check(model, SimpleNamespace(path="x", dims=ParallelDims(dp_shard=shards, ep=2)))  # pyright: ignore
