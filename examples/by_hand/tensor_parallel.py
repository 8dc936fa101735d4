"""Tensor parallelism: the two matrices of an MLP are cut, the first by columns and the second by rows.

holds    columns / n of the first weight A and of its bias, rows / n of the second weight B, all of the second bias b;
         every token of the batch
travels  activations: one all-reduce in the forward (g) and one in the backward (f), each of tokens x width numbers
equal    x A gives columns of the hidden layer h, and tanh treats each for itself: no rank needs another one's columns.
         B's rows meet just these columns, and a product is the sum of the products of its parts: h B = sum of h_r B_r.

    f  copies x to the ranks: forward the identity, backward the sum, because each rank's A_r adds to the gradient of x
    g  sums the products:     forward the sum, backward the identity, because each summand's derivative is one

The bias b is added AFTER g. Added before, by every rank, it would be summed n times.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019
(arXiv:1909.08053), section 3, figure 3.
"""

import torch
from ring_all_reduce import all_reduce
from torch import Tensor
from wire import report, start

TOKENS, WIDTH, HIDDEN = 24, 12, 48


class F(torch.autograd.Function):
    """Megatron's f: into the part that is cut."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return all_reduce(gradient)


class G(torch.autograd.Function):
    """Megatron's g: out of the part that is cut."""

    @staticmethod
    def forward(ctx, partial: Tensor) -> Tensor:
        return all_reduce(partial)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def main() -> None:
    rank, n = start()
    x, y = torch.randn(2, TOKENS, WIDTH)
    whole = [torch.randn(shape) / 4 for shape in ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,))]
    a, a_bias, b, b_bias = whole

    my_x = x.clone().requires_grad_()
    cuts = [a.chunk(n, dim=1)[rank], a_bias.chunk(n)[rank], b.chunk(n)[rank], b_bias]
    mine = [cut.clone().requires_grad_() for cut in cuts]
    hidden = torch.tanh(F.apply(my_x) @ mine[0] + mine[1])
    output = G.apply(hidden @ mine[2]) + mine[3]
    ((output - y) ** 2).sum().backward()

    everything = [tensor.requires_grad_() for tensor in (x, *whole)]
    expected = torch.tanh(x @ a + a_bias) @ b + b_bias
    ((expected - y) ** 2).sum().backward()
    dx, da, da_bias, db, db_bias = (tensor.grad for tensor in everything)
    cut_gradients = [dx, da.chunk(n, dim=1)[rank], da_bias.chunk(n)[rank], db.chunk(n)[rank], db_bias]
    columns = HIDDEN // n
    holds = f"{columns} of {HIDDEN} columns of A, {columns} of {HIDDEN} rows of B, all {TOKENS} tokens"
    found = [output, my_x.grad, *(tensor.grad for tensor in mine)]
    report("tensor parallel", holds, found, [expected, *cut_gradients])


if __name__ == "__main__":
    main()
