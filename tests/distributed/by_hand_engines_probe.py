"""Lessons of examples/by_hand/ against what the engines run on: shards of FSDP2 and DeepSpeed, the engine's tp layer.

Prints one line on rank 0 per comparison: its name and the largest relative difference on any rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_local_grad
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.engines import tensor_parallel
from samecurve.engines.mesh import Mesh
from samecurve.strategy.parallel_dims import ParallelDims

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "by_hand"))
import data_parallel as lesson  # noqa: E402
import zero3  # noqa: E402
from tensor_parallel import F, G  # noqa: E402  # the lesson's; the engine's is a module of a package
from wire import start  # noqa: E402


def compare(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    worst = max(
        float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(found, expected, strict=True)
    )
    largest = torch.tensor(worst)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"COMPARED {name} {largest.item():.1e}", flush=True)


class Product(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def zero3_and_fsdp2(rank: int, n: int) -> None:
    x, y = torch.randn(2, lesson.ROWS, lesson.WIDTH)
    initial = [torch.randn(lesson.WIDTH, lesson.HIDDEN) / 4, torch.randn(lesson.HIDDEN, lesson.WIDTH) / 4]
    shards, _ = zero3.train(x, y, initial, rank, n)

    model = nn.Sequential(Product(initial[0]), nn.Tanh(), Product(initial[1]))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(lesson.STEPS):
        optimizer.zero_grad()
        # FSDP2 averages over ranks what the lesson sums
        loss = n * ((model(x.chunk(n)[rank]) - y.chunk(n)[rank]) ** 2).sum() / lesson.ROWS
        loss.backward()
        optimizer.step()
    expected = list(model.parameters())
    local = [each.to_local() for each in expected] + [each.grad.to_local() for each in expected]
    compare("zero3", [*shards, *(shard.grad for shard in shards)], local)


def zero3_and_deepspeed(rank: int, n: int) -> None:
    """The gradients' shards of the first step, in fp32, as configs/zero3.yaml has them."""
    x, y = torch.randn(2, lesson.ROWS, lesson.WIDTH).float()
    initial = [torch.randn(lesson.WIDTH, lesson.HIDDEN) / 4, torch.randn(lesson.HIDDEN, lesson.WIDTH) / 4]
    initial = [weight.float() for weight in initial]
    shards = [weight.chunk(n)[rank].clone().requires_grad_() for weight in initial]
    rows, targets = x.chunk(n)[rank], y.chunk(n)[rank]
    hidden = torch.tanh(zero3.ShardedLinear.apply(rows, shards[0]))
    (((zero3.ShardedLinear.apply(hidden, shards[1]) - targets) ** 2).sum() / lesson.ROWS).backward()

    model = nn.Sequential(Product(initial[0]), nn.Tanh(), Product(initial[1]))
    sharding = {"stage": 3, "stage3_param_persistence_threshold": 0}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, as in engines/cpu_bridge.py
    settings = {"train_micro_batch_size_per_gpu": len(rows), "zero_optimization": sharding}
    optimizer = torch.optim.Adam(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    engine.backward(n * ((engine(rows) - targets) ** 2).sum() / lesson.ROWS)  # DeepSpeed averages over ranks
    found = [safe_get_local_grad(weight) for weight in model.parameters()]
    compare("deepspeed", [shard.grad.flatten() for shard in shards], [each.flatten() for each in found])


def tp_layer(rank: int, n: int) -> None:
    """The SwiGLU of a Llama, cut by the engine from transformers' plan, and by the lesson's f and g."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensor_parallel.apply(model, Mesh(ParallelDims(tp=n), rank, torch.device("cpu")), cuts_sequence=False)
    layer = tensor_parallel.allocate(model, torch.device("cpu")).model.layers[0].mlp
    local = [getattr(layer, name).weight.to_local() for name in ("gate_proj", "up_proj", "down_proj")]
    generator = torch.Generator().manual_seed(rank)
    for weight in local:
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 4)
    gate, up, down = (weight.detach().clone().requires_grad_() for weight in local)
    x, other = (torch.ones(6, 16).cumsum(0).sin().requires_grad_() for _ in range(2))

    inside = F.apply(x)
    output = G.apply(nn.functional.silu(inside @ gate.T) * (inside @ up.T) @ down.T)
    output.square().sum().backward()
    expected = layer(other)
    expected.square().sum().backward()
    gradients = [getattr(layer, name).weight.grad.to_local() for name in ("gate_proj", "up_proj", "down_proj")]
    compare("tp", [output, x.grad, gate.grad, up.grad, down.grad], [expected, other.grad, *gradients])


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = start()
    zero3_and_fsdp2(rank, n)
    zero3_and_deepspeed(rank, n)
    tp_layer(rank, n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
