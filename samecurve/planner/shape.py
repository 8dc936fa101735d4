"""Dimensions of a decoder-only transformer, and the parameters that follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model.

    Attributes:
        ffn: width of one MLP, of one expert in a mixture.
        gated: whether the MLP has three matrices (SwiGLU) or two (GELU).
        tied: whether the input embedding is also the output head.
        experts: MLPs per layer, 0 for a dense model.
        top_k: experts that a token visits.
        positions: learned positions, 0 for rotary ones.
        head_dim: width of one attention head where it is not hidden / heads, else 0.
        head_norms: whether queries and keys are normalized.
        post_norms: whether attention and MLP have norms behind them, too.
        fp32_norms: whether norms scale in fp32, as Gemma's.
        score_bytes: what eager attention keeps of a score in 16 bits and in fp32.
        mlp_bytes: what a gated MLP keeps per element of its width, in 16 bits and in fp32.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    experts: int = 0
    top_k: int = 0
    positions: int = 0
    head_dim: int = 0
    head_norms: bool = False
    post_norms: bool = False
    fp32_norms: bool = False
    score_bytes: tuple[int, int] = (6, 4)
    mlp_bytes: tuple[int, int] = (8, 16)

    @property
    def kv_share(self) -> float:
        """Width of the keys divided by the width of the queries; 1 without grouped-query attention."""
        return self.kv_heads / self.heads

    @property
    def attention_width(self) -> int:
        """Width a of the queries of all heads; the hidden size, but 2 h in Qwen3-0.6B."""
        return self.heads * self.head_dim if self.head_dim else self.hidden

    @property
    def attention_parameters(self) -> float:
        """Weights of one layer's attention: query and output h a each, key and value h a kv_heads/heads each."""
        return self.hidden * self.attention_width * (2 + 2 * self.kv_share)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> float:
        """Weights of one layer, all experts and their router included."""
        return self.dense_layer_parameters + self.expert_layer_parameters

    @property
    def dense_layer_parameters(self) -> float:
        """Weights of one layer that expert parallelism does not split. GPT's have biases, 9 h + f of them."""
        vectors = 2 * self.hidden if self.gated else 9 * self.hidden + self.ffn
        mlp = self.hidden * self.experts if self.experts else self.mlp_parameters
        return self.attention_parameters + vectors + mlp

    @property
    def expert_layer_parameters(self) -> int:
        return self.experts * self.mlp_parameters

    @property
    def active_layer_parameters(self) -> float:
        """Weights of one layer that multiply a token."""
        return self.attention_parameters + max(self.top_k, 1) * self.mlp_parameters + self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, also where they are the embedding's."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """All weights, the tied head once."""
        untied = 0 if self.tied else self.head_parameters
        return self.layers * self.layer_parameters + self.embedding_parameters + untied + self.hidden  # the last norm

    @property
    def layer_weights(self) -> list[tuple[int, int]]:
        """Shapes of one layer's weights, (n, 1) for vectors; those of all experts together."""
        return [*self.attention_weights, *self.mlp_weights, *self.router_weights]

    @property
    def attention_weights(self) -> list[tuple[int, int]]:
        """Shapes of one layer's attention, and of its norms and biases, which are vectors."""
        width, kv = self.attention_width, round(self.attention_width * self.kv_share)
        matrices = [(width, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, width)]
        vectors = [self.hidden] * 2 if self.gated else [*([self.hidden] * 9), self.ffn]
        return [*matrices, *((size, 1) for size in vectors)]

    @property
    def mlp_weights(self) -> list[tuple[int, int]]:
        """Shapes of one layer's MLP, or of all its experts together."""
        inner = self.ffn * max(self.experts, 1)
        return [(inner, self.hidden)] * (2 if self.gated else 1) + [(self.hidden, inner)]

    @property
    def router_weights(self) -> list[tuple[int, int]]:
        """Shape of one layer's router, empty without experts."""
        return [(self.experts, self.hidden)] if self.experts else []

    @property
    def embedding_weights(self) -> list[tuple[int, int]]:
        return [(self.vocab, self.hidden), *([(self.positions, self.hidden)] if self.positions else [])]

    @property
    def final_weights(self) -> list[tuple[int, int]]:
        return [(self.hidden, 1)]

    @property
    def head_weights(self) -> list[tuple[int, int]]:
        """Shape of the output head's weight, empty where it is the embedding's."""
        return [] if self.tied else [(self.vocab, self.hidden)]

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Shapes of all weights."""
        layers = self.layer_weights * self.layers
        return [*self.embedding_weights, *layers, *self.final_weights, *self.head_weights]
