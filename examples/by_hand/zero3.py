"""ZeRO-3 (fully sharded data parallelism): each rank keeps 1 / n of every weight, and borrows the rest layer by layer.

holds    weights / n, gradients / n, optimizer state / n, rows / n of the batch, and one gathered layer at a time
travels  each layer's weights by an all-gather before its forward and again before its backward, its gradients by a
         reduce-scatter after the backward: 3 (n - 1) / n of the weights' bytes per rank, 1.5 times data parallelism
equal    A gathered layer is the layer: the forward does not change. The reduce-scatter gives each rank the summed
         gradient of just the rows that it keeps, and Adam updates them as in ZeRO-1.

The gathered weight is not kept for the backward: that is what saves the memory, and why it is gathered twice.

Rajbhandari et al., "ZeRO", 2019 (arXiv:1910.02054); Zhao et al., "PyTorch FSDP", 2023 (arXiv:2304.11277).
"""

import torch
from data_parallel import HIDDEN, ROWS, STEPS, WIDTH, one_process
from ring_all_reduce import all_gather, reduce_scatter
from torch import Tensor
from wire import report, start


class ShardedLinear(torch.autograd.Function):
    """x @ weight, where this rank keeps some rows of the weight. x: (rows, in), shard: (in / n, out)."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor) -> Tensor:
        ctx.save_for_backward(x, shard)  # the shard, not the weight
        return x @ all_gather(shard)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, shard = ctx.saved_tensors
        weight = all_gather(shard)
        return gradient @ weight.T, reduce_scatter(x.T @ gradient)


def train(x: Tensor, y: Tensor, initial: list[Tensor], rank: int, n: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Train on this rank's rows. Returns this rank's shards, with the last gradients, and their optimizer."""
    my_x, my_y = x.chunk(n)[rank], y.chunk(n)[rank]
    shards = [weight.chunk(n)[rank].clone().requires_grad_() for weight in initial]
    optimizer = torch.optim.Adam(shards, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = torch.tanh(ShardedLinear.apply(my_x, shards[0]))
        (((ShardedLinear.apply(hidden, shards[1]) - my_y) ** 2).sum() / ROWS).backward()
        optimizer.step()
    return shards, optimizer


def main() -> None:
    rank, n = start()
    x, y = torch.randn(2, ROWS, WIDTH)
    initial = [torch.randn(WIDTH, HIDDEN) / 4, torch.randn(HIDDEN, WIDTH) / 4]
    shards, optimizer = train(x, y, initial, rank, n)

    expected = one_process(x, y, initial)
    parts = [whole.chunk(n)[rank] for whole in [*expected, *(weight.grad for weight in expected)]]
    count = sum(shard.numel() for shard in shards)
    state = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
    holds = f"{count} weights, {count} gradients, {state} optimizer values, {ROWS // n} of {ROWS} rows"
    report("ZeRO-3", holds, [*shards, *(shard.grad for shard in shards)], parts)


if __name__ == "__main__":
    main()
