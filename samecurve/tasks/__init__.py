"""What is trained: which rows, which loss, which metrics. A module's name is the recipe's `task`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from ..config import Recipe
    from ..engines.base import EvalResult
    from ..rows import Rows


class Task(Protocol):
    """held_out: None when the recipe holds nothing out. special_tokens: ids for a from-scratch model's config."""

    tokenizer: PreTrainedTokenizerFast
    train: Rows
    held_out: Rows | None
    vocabulary_size: int
    special_tokens: dict[str, int]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """fp32 scalar: the sum over the trained tokens, which the engine divides by the step's global count."""

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """The `eval_*` values of metrics.jsonl."""

    def describe(self) -> dict[str, object]:
        """What the data are, for the header and run.json."""


def load(recipe: Recipe) -> Task:
    """Tokenizer and rows of the recipe's task. DataError when the data cannot be used."""
    return import_module(f".{recipe.task}", __package__).load(recipe)
