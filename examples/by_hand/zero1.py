"""ZeRO-1: data parallelism in which each rank keeps the optimizer state of 1 / n of the weights only.

holds    all weights, all gradients, optimizer state / n, rows / n of the batch
travels  gradients by a reduce-scatter, updated weights by an all-gather: together the bytes of data parallelism's
         all-reduce, because an all-reduce IS these two, one after the other
equal    Adam treats every number for itself. Whoever has the summed gradient and the moments of a weight can update it;
         here that is exactly one rank, which then tells the others.

ZeRO-2 is the same program: after the reduce-scatter it frees the gradients of which this rank updates no weight.
In mixed precision the fp32 copy of the weights counts as optimizer state; Adam then has 12 bytes per weight to cut.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019 (arXiv:1910.02054).
"""

import torch
from data_parallel import HIDDEN, ROWS, STEPS, WIDTH, loss_sum, one_process
from ring_all_reduce import all_gather, reduce_scatter
from torch import Tensor
from wire import report, start


def train(
    x: Tensor, y: Tensor, initial: list[Tensor], rank: int, n: int
) -> tuple[list[Tensor], Tensor, torch.optim.Optimizer]:
    """Train on this rank's rows. Returns the weights, the shard that this rank updates, and its optimizer."""
    my_x, my_y = x.chunk(n)[rank], y.chunk(n)[rank]
    # All weights in one flat tensor, of which `weights` are views: what the all-gather brings, the model computes with.
    flat = torch.cat([weight.flatten() for weight in initial])
    sizes = [weight.numel() for weight in initial]
    weights = [part.view_as(like) for part, like in zip(flat.split(sizes), initial, strict=True)]
    my_shard = flat.chunk(n)[rank].clone()
    optimizer = torch.optim.Adam([my_shard], lr=0.01)  # knows 1 / n of the weights: so are its moments

    for _ in range(STEPS):
        leaves = [weight.clone().requires_grad_() for weight in weights]
        gradients = torch.autograd.grad(loss_sum(my_x, my_y, leaves) / ROWS, leaves)
        my_shard.grad = reduce_scatter(torch.cat([gradient.flatten() for gradient in gradients]))
        optimizer.step()
        flat.copy_(all_gather(my_shard))
    return weights, my_shard, optimizer


def main() -> None:
    rank, n = start()
    x, y = torch.randn(2, ROWS, WIDTH)
    initial = [torch.randn(WIDTH, HIDDEN) / 4, torch.randn(HIDDEN, WIDTH) / 4]
    weights, my_shard, optimizer = train(x, y, initial, rank, n)

    count = sum(weight.numel() for weight in weights)
    state = sum(value.numel() for value in optimizer.state[my_shard].values() if value.dim())
    holds = f"{count} weights, {count} gradients, {state} optimizer values, {ROWS // n} of {ROWS} rows"
    expected = one_process(x, y, initial)
    gradient = torch.cat([weight.grad.flatten() for weight in expected]).chunk(n)[rank]
    report("ZeRO-1", holds, [*weights, my_shard.grad], [*expected, gradient])


if __name__ == "__main__":
    main()
