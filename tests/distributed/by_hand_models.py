"""The models of examples/by_hand/ in the form in which an engine takes a model, its rows and its task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from samecurve.data.micro_batch import MicroBatch
from samecurve.interfaces.task import Task


class Product(nn.Module):
    """x @ weight, and its tanh where a layer of the lesson ends."""

    def __init__(self, rows: int, columns: int, index: int, ends_in_tanh: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.index, self.ends_in_tanh = index, ends_in_tanh

    def forward(self, x: Tensor, **_arguments: object) -> Tensor:
        product = x @ self.weight
        return torch.tanh(product) if self.ends_in_tanh else product


class Mlp(PreTrainedModel):
    """The MLP of data_parallel.py, which reads its rows as x, (rows, width). `initial`: its two weights."""

    config_class = LlamaConfig
    base_model_prefix = "model"
    initial: Sequence[Tensor] = ()

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(Product(*each.shape, i, i == 0) for i, each in enumerate(self.initial))
        self.post_init()

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Product):
            module.weight.copy_(self.initial[module.index])


class Tower(PreTrainedModel):
    """The layers of pipeline.py where a Llama has its own, behind an embedding that has the rows, before an identity.

    Attributes:
        rows: (number of rows, width).
        initial: the weights of the layers.
        with_identities: whether a product with the identity follows each layer, for two stages per rank.
    """

    config_class = LlamaConfig
    base_model_prefix = "model"
    rows: Tensor
    initial: Sequence[Tensor] = ()
    with_identities: bool = False

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        num_rows, width = self.rows.shape
        count = len(self.initial) * (1 + self.with_identities)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(num_rows, width)
        ends = [i % 2 == 0 or not self.with_identities for i in range(count)]
        self.model.layers = nn.ModuleList(Product(width, width, i, end) for i, end in enumerate(ends))
        self.model.norm, self.model.rotary_emb = nn.Identity(), NoAngles()
        self.lm_head = nn.Linear(width, width, bias=False)
        self.post_init()

    @classmethod
    def place(cls, layer: int) -> int:
        """Return the index, among the model's, of a layer of the lesson."""
        return layer * (1 + cls.with_identities)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.copy_(self.rows)
        elif isinstance(module, Product) and module.ends_in_tanh:
            module.weight.copy_(self.initial[module.index // (1 + self.with_identities)])
        elif isinstance(module, (Product, nn.Linear)):
            nn.init.eye_(module.weight)


class NoAngles(nn.Module):
    """Stands for the rotary embedding, which no layer reads."""

    def __init__(self, config: LlamaConfig | None = None):
        super().__init__()

    def forward(self, hidden: Tensor, position_ids: Tensor) -> None:
        return None


class SquaredErrors(Task):
    """Sums the squared errors of the lessons; a unit is a row."""

    counts = "rows"
    special_tokens: dict[str, int] = {}

    def outputs(self, output: Tensor) -> Tensor:
        return output

    def step_loss(self, logits: Tensor, labels: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """logits, y: (rows, width), or (rows, 1, width) from a pipeline; labels: (rows,), not read."""
        return (logits.flatten(1) - y).square().sum(), logits.new_zeros(0)

    def count(self, labels: Tensor, y: Tensor) -> int:
        return len(labels)


def micro_batches(x: Tensor, y: Tensor, shard: tuple[int, int], size: int, embedded: bool) -> list[MicroBatch]:
    """Cut this rank's rows into micro-batches of `size`. x, y: all rows, (rows, width); embedded: without x."""
    index, count = shard
    found = []
    for places in torch.arange(len(x)).chunk(count)[index].split(size):
        inputs = {"input_ids": places[:, None]} | ({} if embedded else {"x": x[places].float()})
        targets = {"labels": torch.zeros(len(places), dtype=torch.long), "y": y[places].float()}
        found.append(MicroBatch(inputs, targets, places=places))
    return found


def skeleton(kind: type[PreTrainedModel], num_layers: int) -> PreTrainedModel:
    """Build a model on the meta device, as an engine gets it."""
    config = LlamaConfig(num_hidden_layers=num_layers, num_attention_heads=1, num_key_value_heads=1, use_cache=False)
    with torch.device("meta"):
        return kind(config)
