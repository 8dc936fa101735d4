"""Sequence parallelism: tensor parallelism whose norm and residual are cut, too, along the tokens.

holds    outside of the two cut matrices tokens / n, where tensor parallelism keeps all tokens on each rank; weights as
         there: A by columns, B by rows, the norm's weight and the bias b whole
travels  an all-gather of tokens before A, a reduce-scatter after B, and the reverse in the backward: to the byte what f
         and g of tensor parallelism send, because their all-reduce is a reduce-scatter and an all-gather
equal    The norm treats every token for itself. The reduce-scatter gives each rank the finished sum for its tokens.

The norm's weight and b are whole on every rank but see only its tokens: their gradients are partial sums, and have to
be added over ranks. Without that the first step's loss is right, and everything after it is wrong.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (arXiv:2205.05198).
"""

import torch
from ring_all_reduce import all_gather, all_reduce, reduce_scatter
from torch import Tensor
from torch.nn.functional import rms_norm
from wire import bytes_sent, report, start

TOKENS, WIDTH, HIDDEN = 24, 12, 48


class Gather(torch.autograd.Function):
    """From tokens / n to all tokens."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return all_gather(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return reduce_scatter(gradient)


class ReduceScatter(torch.autograd.Function):
    """From partial sums of all tokens to the finished sums of tokens / n."""

    @staticmethod
    def forward(ctx, partial: Tensor) -> Tensor:
        return reduce_scatter(partial)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return all_gather(gradient)


def main() -> None:
    rank, n = start()
    x, y = torch.randn(2, TOKENS, WIDTH)
    whole = [torch.randn(shape) / 4 for shape in ((WIDTH,), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH,))]
    scale, a, b, bias = whole

    my_x, my_y = x.chunk(n)[rank].clone().requires_grad_(), y.chunk(n)[rank]
    mine = [t.clone().requires_grad_() for t in (scale, a.chunk(n, dim=1)[rank], b.chunk(n)[rank], bias)]
    tokens = Gather.apply(rms_norm(my_x, (WIDTH,), mine[0]))
    output = my_x + ReduceScatter.apply(torch.tanh(tokens @ mine[1]) @ mine[2]) + mine[3]
    ((output - my_y) ** 2).sum().backward()
    assert bytes_sent() == 2 * 2 * (n - 1) * x.numel() * x.element_size() // n, "two all-reduces of tensor parallelism"
    for partial in (mine[0], mine[3]):
        partial.grad = all_reduce(partial.grad)

    everything = [tensor.requires_grad_() for tensor in (x, *whole)]
    expected = x + torch.tanh(rms_norm(x, (WIDTH,), scale) @ a) @ b + bias
    ((expected - y) ** 2).sum().backward()
    dx, dscale, da, db, dbias = (tensor.grad for tensor in everything)
    cut_gradients = [dx.chunk(n)[rank], dscale, da.chunk(n, dim=1)[rank], db.chunk(n)[rank], dbias]
    columns = HIDDEN // n
    holds = f"{columns} of {HIDDEN} columns of A, {columns} of {HIDDEN} rows of B, {len(my_x)} of {TOKENS} tokens"
    found = [output, my_x.grad, *(tensor.grad for tensor in mine)]
    report("sequence parallel", holds, found, [expected.chunk(n)[rank], *cut_gradients])


if __name__ == "__main__":
    main()
