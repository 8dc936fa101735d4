"""Textbook ratios of communication to the computation that can hide it, and sizes; hidden where a ratio is at most 1.

The ultra-scale playbook's appendix gives these ratios with three errors, which are corrected here:

- Its data-parallel ratio keeps a factor of the number of parameters P. P cancels: 2 P (n - 1) / (n B) of communication
  over 4 T P / F of backward pass.
- What it calls bytes are elements. `element_bytes` stands in each ratio here.
- It counts Adam's states of a block as 6 h^2 of 2 bytes for 3 h^2 fp32 elements: 12 bytes per parameter.

F: FLOP/s of a GPU. B: bus bandwidth in bytes/s. n: ranks of the group.
"""

from __future__ import annotations

BLOCK_GATED = 16  # weights of a block in units of h^2, with ffn = 4 h


def data_parallel(tokens: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Gradient all-reduce over backward pass: e (n - 1) / n F / (2 T B).

    Args:
        tokens: T, per rank and step.
        ranks: n, data-parallel.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of a gradient.
    """
    return element_bytes * (ranks - 1) / ranks * flops / (2 * tokens * bandwidth)


def fully_sharded(tokens: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Gathering the next block over this one's forward: e (n - 1) / n F / (2 s b B).

    Args:
        tokens: s b, per rank and micro-batch.
        ranks: n, among which weights are sharded.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of a weight.
    """
    return element_bytes * (ranks - 1) / ranks * flops / (2 * tokens * bandwidth)


def tensor_parallel(hidden: int, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Gathering the input of a linear layer over its product: e (t - 1) F / (2 h B).

    Args:
        hidden: h, outputs of the layer on all ranks together.
        ranks: t, tensor-parallel.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of an activation.
    """
    return element_bytes * (ranks - 1) * flops / (2 * hidden * bandwidth)


def pipeline(hidden: int, layers: float, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Sending the hidden state over the next stage's forward: e F / (32 h l B).

    Args:
        hidden: h, width of the hidden state.
        layers: l, gated blocks of a stage.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of an activation.
    """
    return element_bytes * flops / (2 * BLOCK_GATED * hidden * layers * bandwidth)


def ring(seq: float, ranks: int, kv_share: float, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Sending a block of keys and values over attention to the one before: e k n F / (s B).

    A block of s / n tokens has 2 e k d bytes of each, and d s / n queries on it take 2 d (s / n)^2 FLOPs under the
    causal mask, which leaves half of 4.

    Args:
        seq: s, tokens of a whole row.
        ranks: n, context-parallel.
        kv_share: k, key heads by query heads.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of a key.
    """
    return element_bytes * kv_share * ranks * flops / (seq * bandwidth)


def exchanged_layer(
    width: float, weights: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2
) -> float:
    """Sending w elements per token to all ranks of a group over a layer's products: e w (n - 1) F / (2 P B).

    Gathered keys and values have w = 2 k d. Queries, keys, values and outputs of Ulysses are 2 (1 + k) d, of which each
    rank keeps 1 / n: w = 2 (1 + k) d / n. Dispatch and combine of experts: w = 2 K h / n.

    Args:
        width: w, elements that a rank sends to each other rank, per token.
        weights: P, that a token meets on a rank.
        ranks: n, of the group.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of an activation.
    """
    return element_bytes * width * (ranks - 1) * flops / (2 * weights * bandwidth)
