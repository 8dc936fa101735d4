"""The output heads that a task may ask for, without a library of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TITLES = {
    "causal_lm": "causal language model",
    "sequence_classification": "sequence classifier",
    "token_classification": "token classifier",
    "masked_lm": "masked language model",
    "embedding": "model without a head, for embeddings",
}


@dataclass(frozen=True)
class Head:
    """The output head of a model.

    Attributes:
        kind: key of TITLES, which stands for the transformers Auto class that builds the model.
        fields: config fields that the task sets, pretrained or not, such as class names and the padding token.
    """

    kind: str = "causal_lm"
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name of the kind of model, for messages."""
        return TITLES[self.kind]


CAUSAL = Head()
