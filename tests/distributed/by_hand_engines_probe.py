"""Lessons of examples/by_hand/ against the functions that the engines run on.

Prints a line for each comparison, see by_hand_compare.py.
"""

from __future__ import annotations

import deepspeed
import torch
from by_hand_compare import compare
from deepspeed.utils import safe_get_local_grad
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from samecurve.accelerator.mesh import Mesh
from samecurve.bench.collective_calls import COLLECTIVES, Buffers
from samecurve.engines import expert_parallel, tensor_parallel
from samecurve.models.attention import head_tail, ring
from samecurve.optim.dtensor import to_local
from samecurve.strategy.parallel_dims import ParallelDims

# isort: split
import data_parallel as lesson
import expert_dispatch
import ring_all_reduce
import ring_attention
import zero3
from sequence_parallel import Gather, ReduceScatter
from tensor_parallel import F, G  # the lesson's; the engine's is a module of a package
from wire import bytes_sent, start


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
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, as in accelerator/cpu_bridge.py
    settings = {"train_micro_batch_size_per_gpu": len(rows), "zero_optimization": sharding}
    optimizer = torch.optim.Adam(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    engine.backward(n * ((engine(rows) - targets) ** 2).sum() / lesson.ROWS)  # DeepSpeed averages over ranks
    found = [safe_get_local_grad(weight) for weight in model.parameters()]
    compare("deepspeed", [shard.grad.flatten() for shard in shards], [each.flatten() for each in found])


def llama(rank: int, n: int, cuts_sequence: bool) -> tuple[LlamaForCausalLM, list[str], Mesh]:
    """A Llama of one layer, cut by the engine from transformers' plan; the names are those that `apply` returns."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    mesh = Mesh(ParallelDims(tp=n), rank, torch.device("cpu"))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        norm = nn.RMSNorm(16, config.rms_norm_eps)  # transformers' computes in fp32
        model.model.norm, model.model.layers[0].post_attention_layernorm = norm, nn.RMSNorm(16, config.rms_norm_eps)
    summed = tensor_parallel.apply(model, mesh, cuts_sequence)
    model = tensor_parallel.allocate(model, torch.device("cpu"))
    for weight in model.parameters():
        generator = torch.Generator().manual_seed(rank if isinstance(weight, DTensor) else n)
        local = to_local(weight.data)
        local.copy_(torch.randn(local.shape, generator=generator) / 4)
    return model, summed, mesh


def mlp_weights(mlp: nn.Module) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Copies of this rank's parts for the lesson, and the engine's parameters."""
    weights = [getattr(mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")]
    return [weight.to_local().detach().clone().requires_grad_() for weight in weights], weights


def tp_layer(rank: int, n: int) -> None:
    """The SwiGLU of a Llama with the lesson's f and g."""
    layer = llama(rank, n, cuts_sequence=False)[0].model.layers[0].mlp
    (gate, up, down), weights = mlp_weights(layer)
    x, other = (torch.ones(6, 16).cumsum(0).sin().requires_grad_() for _ in range(2))

    inside = F.apply(x)
    output = G.apply(nn.functional.silu(inside @ gate.T) * (inside @ up.T) @ down.T)
    output.square().sum().backward()
    expected = layer(other)
    expected.square().sum().backward()
    gradients = [weight.grad.to_local() for weight in weights]
    compare("tp", [output, x.grad, gate.grad, up.grad, down.grad], [expected, other.grad, *gradients])


def tp_sequence_parallel(rank: int, n: int) -> None:
    """All layers of the Llama, with the norms on a part of the tokens; its attention adds nothing."""
    model, summed, mesh = llama(rank, n, cuts_sequence=True)
    layer, norm = model.model.layers[0], model.model.norm
    layer.self_attn.o_proj.weight.data.zero_()
    model.model.rotary_emb.inv_freq.fill_(1.0)  # allocated without values
    (gate, up, down), weights = mlp_weights(layer.mlp)
    own = [each.weight.detach().clone().requires_grad_() for each in (layer.post_attention_layernorm, norm)]
    whole = torch.randn(8, 16)

    x = whole.chunk(n)[rank].clone().requires_grad_()
    tokens = Gather.apply(nn.functional.rms_norm(x, (16,), own[0], norm.eps))
    states = x + ReduceScatter.apply(nn.functional.silu(tokens @ gate.T) * (tokens @ up.T) @ down.T)
    output = nn.functional.rms_norm(states, (16,), own[1], norm.eps)
    output.square().sum().backward()
    sums = [ring_all_reduce.all_reduce(weight.grad) for weight in own]

    rows = whole[None].clone().requires_grad_()
    expected = model.model(inputs_embeds=rows).last_hidden_state
    expected.square().sum().backward()
    partial = dict(model.named_parameters())
    tensor_parallel.sum_gradients([partial[name] for name in summed], mesh)
    wanted = [each[0].chunk(n)[rank] for each in (expected, rows.grad)]
    wanted += [weight.grad.to_local() for weight in weights]
    wanted += [layer.post_attention_layernorm.weight.grad, norm.weight.grad]
    compare("tp_sequence_parallel", [output, x.grad, gate.grad, up.grad, down.grad, *sums], wanted)


def collectives(rank: int, n: int) -> None:
    """The ring and its two halves as `bench collectives` makes them, by a ring of its own and by torch."""
    start()
    mine = torch.randn(120, generator=torch.Generator().manual_seed(rank))
    by_hand = {
        "ring_all_reduce": ring_all_reduce.all_reduce,
        "all_reduce": ring_all_reduce.all_reduce,
        "reduce_scatter": ring_all_reduce.reduce_scatter,
        "all_gather": lambda whole: ring_all_reduce.all_gather(whole[: len(whole) // n]),
    }
    for name, function in by_hand.items():
        before, buffers = bytes_sent(), Buffers(4 * mine.numel(), torch.device("cpu"))  # counts 4 bytes per number
        buffers.whole.copy_(mine)
        buffers.part.copy_(mine[: mine.numel() // n])
        found = function(mine)
        sent = torch.tensor((bytes_sent() - before) / (mine.numel() * mine.element_size()))
        expected = COLLECTIVES[name].run(buffers)
        factor = torch.tensor(COLLECTIVES[name].factor(n))  # which turns the data into what a rank sends
        compare(name, [found, sent], [expected, factor])


def attention(rank: int, n: int) -> None:
    """The engine's ranks have a chunk from either end of the row each, the lesson's a part of neighbouring tokens."""
    start()
    lesson_shape = ring_attention.HEADS, ring_attention.TOKENS, ring_attention.WIDTH
    q, k, v, given = torch.randn(4, *lesson_shape)
    mine = [each.chunk(n, dim=1)[rank] for each in (q, k, v)]
    output, total = ring_attention.forward(*mine)
    parts = [output, *ring_attention.backward(given.chunk(n, dim=1)[rank], *mine, output, total)]
    whole = [ring_all_reduce.all_gather(part.transpose(0, 1)).transpose(0, 1) for part in parts]
    found = [head_tail.cut(each, rank, n, dim=1) for each in whole]

    own = [head_tail.cut(each, rank, n, dim=1)[None].requires_grad_() for each in (q, k, v)]
    first = torch.zeros(1, ring_attention.TOKENS // n, dtype=torch.long)  # of the keys that a query sees: one document
    mask = ring.RingMask.of(first)
    expected = ring.attend(*own, mask, ring_attention.WIDTH**-0.5, dist.group.WORLD)
    expected.backward(head_tail.cut(given, rank, n, dim=1).transpose(0, 1)[None])
    compare("ring_attention", found, [expected[0].transpose(0, 1), *(each.grad[0] for each in own)])


class Experts(nn.Module):
    """The lesson's experts as a module of transformers: outputs of a token's chosen ones, weighted and added up."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight, self.num_experts = nn.Parameter(weight.clone()), len(weight)

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.tanh(torch.einsum("tw,tcwv->tcv", states, self.weight[chosen]))
        return (weights[..., None] * outputs).sum(dim=1)


def dispatch(rank: int, n: int) -> None:
    """All experts in a module where a Mixtral has them, which the engine spreads over the ranks."""
    start()
    x, y = torch.randn(2, expert_dispatch.TOKENS, expert_dispatch.WIDTH).chunk(n, dim=1)[rank]
    router = torch.randn(expert_dispatch.WIDTH, expert_dispatch.EXPERTS)
    weight = torch.randn(expert_dispatch.EXPERTS, expert_dispatch.WIDTH, expert_dispatch.WIDTH) / 2
    mine = [each.clone().requires_grad_() for each in (x, router, weight.chunk(n)[rank])]
    output = expert_dispatch.layer(*mine, n)
    (output - y).square().sum().backward()

    experts, model = Experts(weight), nn.Module()
    model.config = MixtralConfig()
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})
    model.layers = nn.ModuleList([layer])
    expert_parallel.apply(model, Mesh(ParallelDims(dp_shard=n, ep=n), rank, torch.device("cpu")))
    others = [each.clone().requires_grad_() for each in (x, router)]
    weights, chosen = (others[0] @ others[1]).softmax(-1).topk(expert_dispatch.CHOSEN)
    expected = experts(others[0], chosen, weights)
    (expected - y).square().sum().backward()
    gradients = [*(each.grad for each in others), experts.weight.grad.to_local()]
    compare("expert_dispatch", [output, *(each.grad for each in mine)], [expected, *gradients])


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = start()
    zero3_and_fsdp2(rank, n)
    zero3_and_deepspeed(rank, n)
    for comparison in (tp_layer, tp_sequence_parallel, collectives, attention, dispatch):
        comparison(rank, n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
