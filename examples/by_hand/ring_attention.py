"""Ring attention: each rank has a part of the sequence; keys and values travel around a ring, queries stay.

holds    queries, keys and values of tokens / n; never a score between more than (tokens / n) x (tokens / n) tokens
travels  forward: k and v, n - 1 times; backward: k and v again, and with them their gradients, n times, so that these
         come home with what every rank has added
equal    softmax(s) v = sum of exp(s) v / sum of exp(s), over all keys. Both sums may be taken block by block. Against
         overflow each rank keeps the output so far and the logarithm of the denominator, L: a block with its own (o, l)
         is merged by  L' = log(e^L + e^l),  out' = e^(L - L') out + e^(l - L') o  (the online softmax).

Causal: a block of later keys adds nothing. Rank 0 is done after one block while the last rank has work in all n; real
implementations hand each rank a piece from the head and one from the tail of the sequence.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023 (arXiv:2310.01889); Dao et al.,
"FlashAttention", 2022 (arXiv:2205.14135), whose backward from L and D this is.
"""

import torch
from ring_all_reduce import neighbours
from torch import Tensor
from wire import exchange, report, start

TOKENS, HEADS, WIDTH = 24, 2, 6


def scores(q: Tensor, k: Tensor, q_block: int, k_block: int) -> Tensor:
    """Scores of a block of queries and a block of keys, -inf where a key comes later. q, k: (heads, t, width)."""
    first, t = (q_block - k_block) * q.shape[1], q.shape[1]
    later = torch.arange(t)[None, :] > torch.arange(t)[:, None] + first
    return (q @ k.mT / WIDTH**0.5).masked_fill(later, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of this rank's queries, and L, the logarithm of their softmax's denominator."""
    rank, n, after, before = neighbours()
    out, total = torch.zeros_like(q), torch.full((*q.shape[:2], 1), -torch.inf)
    for step in range(n):
        owner = (rank - step) % n  # of the keys that are here now
        if owner <= rank:
            block = scores(q, k, rank, owner)
            part = block.logsumexp(-1, keepdim=True)
            merged = torch.logaddexp(total, part)
            out = torch.exp(total - merged) * out + torch.exp(block - merged) @ v
            total = merged
        if step < n - 1:
            k, v = exchange(torch.stack([k, v]), after, before)
    return out, total


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    rank, n, after, before = neighbours()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d = (dout * out).sum(-1, keepdim=True)  # what the softmax's derivative subtracts, the same for all keys
    for step in range(n):
        owner = (rank - step) % n
        if owner <= rank:
            p = torch.exp(scores(q, k, rank, owner) - total)
            ds = p * (dout @ v.mT - d) / WIDTH**0.5
            dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dout
        if step < n - 1:
            k, v = exchange(torch.stack([k, v]), after, before)
        dk, dv = exchange(torch.stack([dk, dv]), after, before)  # n times: around, and home
    return dq, dk, dv


def main() -> None:
    rank, n = start()
    q, k, v, dout = torch.randn(4, HEADS, TOKENS, WIDTH)
    mine = [tensor.chunk(n, dim=1)[rank] for tensor in (q, k, v)]
    out, total = forward(*mine)
    found = [out, *backward(dout.chunk(n, dim=1)[rank], *mine, out, total)]

    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected.backward(dout)
    parts = [tensor.chunk(n, dim=1)[rank] for tensor in (expected, *(leaf.grad for leaf in leaves))]
    report("ring attention", f"q, k, v of {out.shape[1]} of {TOKENS} tokens, {HEADS} heads", found, parts)


if __name__ == "__main__":
    main()
