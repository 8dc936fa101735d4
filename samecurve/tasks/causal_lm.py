"""Base of the tasks that train a causal language model on tokens: loss, metrics and data loading."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.base import DocumentRows, GroupedDocumentRows, Rows
from samecurve.data.encoder import Encoder, vocabulary_size
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.models.hf_config import Head
from samecurve.tasks import mixture_splits, splits, streaming_splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class CausalTask(Task):
    """Next-token prediction, for pretraining and fine-tuning.

    Attributes:
        empty_documents: number of documents that were dropped because they hold no token.
        details: further entries of `describe`, about the data.
    """

    head = Head()
    by_token = True
    tokenizer: PreTrainedTokenizerFast
    train: Rows
    held_out: Rows | None
    empty_documents: int = 0
    details: dict[str, object] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return self.details.get(splits.ORIGIN, "")

    @property
    def vocabulary_size(self) -> int:
        return vocabulary_size(self.tokenizer)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.tokenizer.eos_token_id}

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.new_zeros(0)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss in nats per token, eval_perplexity, eval_bits_per_byte and eval_tokens.

        Bits per byte are comparable between tokenizers of different vocabularies.
        """
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
        return splits.Parts(self.train, self.held_out, self.empty_documents, {}).describe() | {
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
    encoder: Encoder,
    find: Callable[[Data], sources.DataSource],
    make_rows: Callable[[token_store.TokenStream], Rows],
) -> CausalTask:
    """Load the rows of a causal language modelling task, from one data set, a mixture or a stream.

    Args:
        recipe: the whole recipe.
        text_tokenizer: tokenizer of the task.
        encoder: turns a document into token ids.
        find: returns the source of one `data` block.
        make_rows: cuts a token stream into rows.

    Raises:
        DataError: see `splits.load`.
    """
    details: dict[str, object] = {}
    if recipe.data.mixture is not None:
        found = mixture_splits.load(recipe, encoder, find, make_rows)
        details = mixture_splits.describe(recipe, found)
    elif recipe.data.streaming:
        found = streaming_splits.load(recipe, encoder, make_rows)
    else:
        found = splits.load(recipe, encoder, find, make_rows)
    return CausalTask(text_tokenizer, found.train, found.held_out, found.empty_documents, details | found.counts)


def load_tokenizer(recipe: Recipe, find: Callable[[Data], sources.DataSource]) -> PreTrainedTokenizerFast:
    """Load the recipe's tokenizer, or train it on all training documents. Raises as `tokenizer.load_tokenizer` does."""
    return tokenizer.load_tokenizer(recipe, lambda data: mixture_splits.find(recipe, find))


def document_rows(recipe: Recipe, stream: token_store.TokenStream, padding_token: int) -> DocumentRows:
    """Return rows of one document each, grouped by length if the recipe sets data.group_by_length."""
    return splits.padded(recipe, (DocumentRows, GroupedDocumentRows), stream, padding_token)
