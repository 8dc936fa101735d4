"""Split a decoder into the ordered list of layers for a pipeline.

Layers pass on the pair (hidden, position_ids): float (micro_batch_size, sequence_length, hidden_size) and int64
(micro_batch_size, sequence_length). The first layer takes (input_ids, position_ids), the last one returns logits
(micro_batch_size, sequence_length, vocabulary_size); of a classifier the scores of all tokens, without a head the last
hidden states. Run in sequence, the layers equal the model bit for bit.

The layers contain the Hugging Face model's own modules, so weights keep their names. Each stage computes from
position_ids what the model computes once for all layers (rotary angles, attention masks).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from samecurve.errors import ConfigurationError
from samecurve.losses.chunked_cross_entropy import HeadReduction
from samecurve.losses.vocabulary_parallel import HeadWeights, own_part
from samecurve.models.hf_config import kind_of
from samecurve.specs.model_families import FAMILIES, NOT_KNOWN, PIPELINED

Flow = tuple[Tensor, Tensor]
ModuleType = TypeVar("ModuleType", bound=nn.Module)


class Layer(nn.Module):
    """One layer of the pipeline. `prefixes` maps each submodule that has weights to its Hugging Face name."""

    def __init__(self, **prefixes: str):
        super().__init__()
        self.prefixes = prefixes

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """List (Hugging Face name, parameter) for every weight of this layer."""
        return [
            (f"{prefix}.{name}", parameter)
            for attribute, prefix in self.prefixes.items()
            for name, parameter in getattr(self, attribute).named_parameters()
        ]


class TokenEmbedding(Layer):
    def __init__(self, tokens: nn.Embedding, prefix: str):
        super().__init__(tokens=prefix)
        self.tokens = tokens

    def forward(self, flow: Flow) -> Flow:
        input_ids, position_ids = flow
        return self.tokens(input_ids), position_ids


class PositionEmbedding(Layer):
    """GPT-2's learned positions, separate from the token embedding, which the last stage may share."""

    def __init__(self, positions: nn.Embedding, dropout: nn.Module, prefix: str):
        super().__init__(positions=prefix)
        self.positions, self.dropout = positions, dropout

    def forward(self, flow: Flow) -> Flow:
        hidden, position_ids = flow
        return self.dropout(hidden + self.positions(position_ids)), position_ids


class Decoder(Layer):
    """One decoder layer. `kind` is "full_attention" or "sliding_attention"."""

    def __init__(self, block: nn.Module, prefix: str, kind: str, positions: Positions):
        super().__init__(block=prefix)
        self.block, self.kind = block, kind
        self.positions = positions

    def forward(self, flow: Flow) -> Flow:
        hidden, position_ids = flow
        return self.block(hidden, **self.positions.arguments(hidden, position_ids, self.kind)), position_ids


class FinalNorm(Layer):
    def __init__(self, norm: nn.Module, prefix: str):
        super().__init__(norm=prefix)
        self.norm = norm

    def forward(self, flow: Flow) -> Tensor:
        return self.norm(flow[0])


class HeadLayer(Layer):
    def __init__(self, head: nn.Linear, prefix: str):
        super().__init__(head=prefix)
        self.head = head

    def forward(self, hidden: Tensor, sums: HeadReduction | None = None) -> Tensor:
        """Compute logits, or `sums` in their place."""
        if sums is None:
            return self.head(hidden)
        return sums.computed(hidden, HeadWeights(self.head.weight, self.head.bias))


class TiedHead(Layer):
    """Output head of a model with tied embeddings, whose weight is the token embedding."""

    def __init__(self, embedding: TokenEmbedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor, sums: HeadReduction | None = None) -> Tensor:
        """Compute logits, or `sums` in their place."""
        if sums is None:
            return project(self.embedding, hidden)
        return sums.computed(hidden, HeadWeights(self.embedding.tokens.weight))

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        return self.embedding.named_weights()


def project(embedding: TokenEmbedding, hidden: Tensor) -> Tensor:
    """Compute logits with the transposed token embedding; without a gradient if its rows are divided over ranks."""
    weight = embedding.tokens.weight
    if not isinstance(weight, DTensor):
        return F.linear(hidden, weight)
    part, _, columns = own_part(weight, None)
    return columns.whole(F.linear(hidden, part))


class Positions:
    """Masks and rotary angles from position_ids, cached for the layers of one stage that see the same micro-batch.

    Without the cache every layer would build, and keep for its backward pass, its own mask of shape
    (micro_batch_size, 1, sequence_length, sequence_length).
    """

    def __init__(self, config: PreTrainedConfig, rotary: nn.Module | None):
        self._config = config
        self._rotary_type = type(rotary) if rotary is not None else None
        self._rotary: nn.Module | None = None
        self._seen: tuple | None = None
        self._arguments: dict[str, dict] = {}

    def arguments(self, hidden: Tensor, position_ids: Tensor, kind: str) -> dict:
        """Return the keyword arguments of a transformers decoder layer, in the dtype of `hidden`."""
        # by identity: each micro-batch has a tensor of its own, and comparing values would wait for the device
        if self._seen is None or self._seen[0] is not position_ids or self._seen[1] != hidden.dtype:
            self._seen, self._arguments = (position_ids, hidden.dtype), {}
        if kind not in self._arguments:
            build = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
            known = {"attention_mask": None, "past_key_values": None, "position_ids": position_ids}
            self._arguments[kind] = {
                # causal, and block-diagonal over the documents of a packed row (where position_ids restart at 0)
                "attention_mask": build(config=self._config, inputs_embeds=hidden, **known),
                "position_ids": position_ids,
                "use_cache": False,
            }
            if self._rotary is None and self._rotary_type is not None:
                # Built here, because the model's own buffers may be on the meta device. On the CPU, as theirs are: a
                # GPU's frequencies differ in the last digits, and so would angles far into a row.
                with torch.device("cpu"):
                    self._rotary = self._rotary_type(config=self._config).to(hidden.device)
            if self._rotary is not None:
                self._arguments[kind]["position_embeddings"] = self._rotary(hidden, position_ids=position_ids)
        return self._arguments[kind]


def split_layers(model: PreTrainedModel) -> list[Layer]:
    """Split the model into layers in execution order, which share its modules (also on the meta device).

    With tied embeddings the last layer is a TiedHead that contains the first layer.

    Raises:
        ConfigurationError: the family is not in PIPELINED, so its forward pass is unknown and cannot be split.
    """
    parts = FAMILIES.get(model.config.model_type, NOT_KNOWN).parts
    if parts is None:
        raise ConfigurationError(
            f"model: a pipeline cannot split a {model.config.model_type}; use another strategy, or one of the families "
            f"{', '.join(sorted(PIPELINED))}"
        )
    kind = kind_of(model)
    if kind == "embedding":  # the names of a model without a head, which has no name in itself
        names = {key: name.partition(".")[2] for key, name in vars(parts).items() if isinstance(name, str)}
        parts = replace(parts, **names)
    embedding = TokenEmbedding(_submodule(model, parts.embedding, nn.Embedding), parts.embedding)
    layers: list[Layer] = [embedding]
    if parts.positions:
        assert parts.dropout  # GPT-2's, behind the positions
        learned = _submodule(model, parts.positions, nn.Embedding)
        layers.append(PositionEmbedding(learned, _submodule(model, parts.dropout, nn.Module), parts.positions))
    positions = Positions(model.config, model.get_submodule(parts.rotary) if parts.rotary else None)
    blocks = _submodule(model, parts.layers, nn.ModuleList)
    for index, (block, attention) in enumerate(zip(blocks, parts.kinds(model.config), strict=True)):
        layers.append(Decoder(block, f"{parts.layers}.{index}", attention, positions))
    layers.append(FinalNorm(model.get_submodule(parts.norm), parts.norm))
    if kind == "sequence_classification":
        layers.append(HeadLayer(_submodule(model, "score", nn.Linear), "score"))
    elif kind == "causal_lm":
        tied = model.lm_head.weight is embedding.tokens.weight
        layers.append(TiedHead(embedding) if tied else HeadLayer(model.lm_head, "lm_head"))
    return layers


def last_scores(scores: Tensor, input_ids: Tensor, padding: int) -> Tensor:
    """Take a classifier's scores of each row's last token that is not padding, as transformers does.

    Args:
        scores: of all tokens, (rows, sequence_length, classes).
        input_ids: (rows, sequence_length).
        padding: the padding token.

    Returns:
        (rows, classes).
    """
    rows, length = input_ids.shape
    places = torch.arange(length, device=input_ids.device) * (input_ids != padding)
    return scores[torch.arange(rows, device=scores.device), places.argmax(dim=1)]


def _submodule(model: PreTrainedModel, name: str, module_class: type[ModuleType]) -> ModuleType:
    module = model.get_submodule(name)
    assert isinstance(module, module_class), name
    return module
