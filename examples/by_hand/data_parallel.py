"""Data parallelism: every rank has the whole model and a share of the rows; gradients are summed over ranks.

holds    all weights, all gradients, all optimizer state, rows / n of the batch
travels  the gradients, once per step: an all-reduce, 2 (n - 1) / n of their bytes per rank
equal    The loss is a sum over rows, and the gradient of a sum is the sum of the gradients. Equal weights and equal
         gradients give equal updates, so that the replicas never drift apart and weights never travel.

The loss is divided by the rows of ALL ranks. Were each rank to divide by its own rows, the sum would be n times too
large; and a mean of the ranks' means is wrong as soon as they have different numbers of rows, or of tokens.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (arXiv:2006.15704).
"""

import torch
from ring_all_reduce import all_reduce
from torch import Tensor
from wire import report, start

ROWS, WIDTH, HIDDEN, STEPS = 24, 12, 24, 3


def loss_sum(x: Tensor, y: Tensor, weights: list[Tensor]) -> Tensor:
    """Squared error of a two-layer MLP, summed over rows. x, y: (rows, WIDTH)."""
    first, second = weights
    return ((torch.tanh(x @ first) @ second - y) ** 2).sum()


def one_process(x: Tensor, y: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The reference: the same steps with the whole batch, and no other rank."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_sum(x, y, weights) / ROWS).backward()
        optimizer.step()
    return weights


def train(x: Tensor, y: Tensor, initial: list[Tensor], rank: int, n: int) -> list[Tensor]:
    """Train on this rank's rows. Returns the weights, with the last gradients."""
    my_x, my_y = x.chunk(n)[rank], y.chunk(n)[rank]
    weights = [weight.clone().requires_grad_() for weight in initial]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_sum(my_x, my_y, weights) / ROWS).backward()  # ROWS, not len(my_x)
        bucket = all_reduce(torch.cat([weight.grad.flatten() for weight in weights]))  # one message, not one per weight
        for weight, grad in zip(weights, bucket.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = grad.view_as(weight)
        optimizer.step()
    return weights


def main() -> None:
    rank, n = start()
    x, y = torch.randn(2, ROWS, WIDTH)
    initial = [torch.randn(WIDTH, HIDDEN) / 4, torch.randn(HIDDEN, WIDTH) / 4]
    weights = train(x, y, initial, rank, n)

    count = sum(weight.numel() for weight in weights)
    holds = f"{count} weights, {count} gradients, {2 * count} optimizer values, {ROWS // n} of {ROWS} rows"
    expected = one_process(x, y, initial)
    # Gradients are compared, too: Adam's update hardly changes when they are all n times too large.
    both = [[*each, *(weight.grad for weight in each)] for each in (weights, expected)]
    report("data parallel", holds, *both)


if __name__ == "__main__":
    main()
