"""What tasks share that train a causal language model on tokens: the loss, the metrics, the checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from .. import corpus, sources, tokenizer
from ..architecture import Head
from ..errors import DataError
from ..rows import DocumentRows, GroupedDocumentRows, Rows
from . import Task, mixed, parts, streamed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..config import Data, Recipe
    from ..engines.base import EvalResult


@dataclass
class CausalTask(Task):
    """details: what else `describe` says of the data."""

    head = Head()
    by_token = True
    tokenizer: PreTrainedTokenizerFast
    train: Rows
    held_out: Rows | None
    empty_documents: int = 0
    details: dict[str, object] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        return corpus.vocabulary_size(self.tokenizer)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.tokenizer.eos_token_id}

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.new_zeros(0)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """eval_loss in nats per token; eval_bits_per_byte, which tokenizers of any vocabulary can be compared by."""
        if result.tokens != self.held_out.num_targets:
            raise DataError(
                f"{result.tokens} held-out tokens were evaluated, but the data hold {self.held_out.num_targets}"
            )
        return {
            "eval_loss": result.loss,
            "eval_perplexity": math.exp(min(result.loss, 700.0)),  # exp(710) overflows a float.
            "eval_bits_per_byte": result.loss * result.tokens / math.log(2) / self._held_out_bytes,
            "eval_tokens": result.tokens,
        }

    def describe(self) -> dict[str, object]:
        return parts.Parts(self.train, self.held_out, self.empty_documents, {}).describe() | {
            "vocabulary_size": self.vocabulary_size,
            "empty_documents": self.empty_documents,
            **self.details,
        }

    @cached_property
    def _held_out_bytes(self) -> int:
        return self.held_out.target_bytes(tokenizer.byte_lengths(self.tokenizer))


def load(
    recipe: Recipe,
    text_tokenizer: PreTrainedTokenizerFast,
    encoder: corpus.Encoder,
    find: Callable[[Data], sources.Source],
    make_rows: Callable[[corpus.TokenStream], Rows],
) -> CausalTask:
    """find: what `data` says of one path to its source. Errors: see parts.load."""
    if recipe.data.mixture is not None:
        found = mixed.load(recipe, encoder, find, make_rows)
        details = mixed.describe(recipe, found) | found.counts
    elif recipe.data.streaming:
        found, details = streamed.load(recipe, encoder, make_rows), {}
    else:
        found = parts.load(recipe, encoder, lambda path: find(recipe.data.read_from(path)), make_rows)
        details = found.counts
    return CausalTask(text_tokenizer, found.train, found.held_out, found.empty_documents, details)


def load_tokenizer(recipe: Recipe, find: Callable[[Data], sources.Source]) -> PreTrainedTokenizerFast:
    """The recipe's. One that is trained here learns from all training documents. Errors: see tokenizer.load."""
    return tokenizer.load(recipe, lambda path: mixed.find(recipe, find))


def document_rows(recipe: Recipe, stream: corpus.TokenStream, padding_token: int) -> DocumentRows:
    """One document a row, as the recipe wants them padded."""
    return parts.padded(recipe, (DocumentRows, GroupedDocumentRows), stream, padding_token)
