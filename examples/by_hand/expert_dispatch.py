"""Expert parallelism: the experts of a mixture-of-experts layer live on different ranks, and tokens travel to them.

holds    experts / n, tokens / n, the whole router
travels  dispatch: each token to the ranks of its two experts, an all-to-all; combine: the outputs back. The backward
         makes the same two journeys. First go the numbers of tokens: a receiver has to know how much will come
equal    An expert treats every token for itself, in whose company does not matter. Each output comes back to the token
         that asked, and is added with the router's weight.

GShard drops tokens that an expert has no room for; nothing is dropped here. The router sees its rank's tokens only, so
its gradient is summed over ranks. An expert's is complete: every token that chose the expert has come to its one rank.

Lepikhin et al., "GShard", 2020 (arXiv:2006.16668); Gale et al., "MegaBlocks", 2022 (arXiv:2211.15841), drops nothing.
"""

import torch
from ring_all_reduce import all_reduce, neighbours
from torch import Tensor
from wire import exchange, report, start

TOKENS, WIDTH, EXPERTS, CHOSEN = 24, 6, 12, 2


def all_to_all(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send the next sent[r] rows of x to each rank r. Returns received[r] rows from each rank r, in order."""
    rank, n, _, _ = neighbours()
    parts, come = x.split(sent), [x] * n
    for shift in range(n):
        to, source = (rank + shift) % n, (rank - shift) % n
        come[source] = exchange(parts[to], to, source, (received[source], *x.shape[1:]))
    return torch.cat(come)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all(gradient, ctx.received, ctx.sent), None, None  # the way back


def layer(x: Tensor, router: Tensor, experts: Tensor, n: int) -> Tensor:
    """x: (tokens / n, WIDTH), router: (WIDTH, EXPERTS), experts: (EXPERTS / n, WIDTH, WIDTH)."""
    weights, chosen = (x @ router).softmax(-1).topk(CHOSEN)
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    token = order // CHOSEN
    counts = chosen.flatten().bincount(minlength=EXPERTS)  # of pairs, for each expert of each rank
    coming = all_to_all(counts, [len(experts)] * n, [len(experts)] * n)
    sent, received = (each.view(n, -1).sum(1).tolist() for each in (counts, coming))
    here = AllToAll.apply(x[token], sent, received)  # dispatch
    expert = torch.arange(len(experts)).repeat(n).repeat_interleave(coming)
    out = torch.zeros_like(here)
    for i, weight in enumerate(experts):
        out = torch.where(expert[:, None] == i, torch.tanh(here @ weight), out)  # a real one computes its rows only
    back = AllToAll.apply(out, received, sent)  # combine
    return torch.zeros_like(x).index_add(0, token, weights.flatten()[order, None] * back)


def main() -> None:
    rank, n = start()
    x, y = torch.randn(2, TOKENS, WIDTH)
    whole = [x, torch.randn(WIDTH, EXPERTS), torch.randn(EXPERTS, WIDTH, WIDTH) / 2]
    mine = [t.clone().requires_grad_() for t in (x.chunk(n)[rank], whole[1], whole[2].chunk(n)[rank])]
    output = layer(*mine, n)
    ((output - y.chunk(n)[rank]) ** 2).sum().backward()
    mine[1].grad = all_reduce(mine[1].grad)

    x, router, experts = (t.requires_grad_() for t in whole)
    weights, chosen = (x @ router).softmax(-1).topk(CHOSEN)
    expected = (weights[..., None] * torch.tanh(torch.einsum("tw,tcwv->tcv", x, experts[chosen]))).sum(1)
    ((expected - y) ** 2).sum().backward()
    found = [output, *(t.grad for t in mine)]
    wanted = [expected.chunk(n)[rank], x.grad.chunk(n)[rank], router.grad, experts.grad.chunk(n)[rank]]
    report("expert dispatch", f"{EXPERTS // n} of {EXPERTS} experts, {len(output)} of {TOKENS} tokens", found, wanted)


if __name__ == "__main__":
    main()
