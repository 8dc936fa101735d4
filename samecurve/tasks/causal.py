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
from ..cache import location
from ..errors import DataError
from ..loss import count_trained, token_loss_sum
from ..rows import DocumentRows, GroupedDocumentRows, Rows, SampleRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..config import Recipe
    from ..engines.base import EvalResult


@dataclass
class CausalTask:
    """details: what else `describe` says of the data."""

    head = Head()
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

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels)

    def count(self, labels: Tensor) -> int:
        return count_trained(labels)

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
        parts = {"train": self.train, "held_out": self.held_out}
        return {name: _describe(rows) for name, rows in parts.items() if rows is not None} | {
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
    find: Callable[[str], sources.Source],
    make_rows: Callable[[corpus.TokenStream], Rows],
) -> CausalTask:
    """find: a path of the recipe to its source.

    Errors: DataError for unusable data, for fewer rows than one global batch, for an empty held-out part.
    """

    def read(path: str, held_out_fraction: float) -> corpus.Corpus:
        return corpus.load(find(path), encoder, held_out_fraction, location(recipe.data.cache_dir))

    fraction = sources.held_out_fraction(recipe)
    training = read(recipe.data.path, fraction)
    held_out = None
    if recipe.evaluate.path is not None:
        held_out = make_rows(read(recipe.evaluate.path, 0.0).train)
    elif fraction > 0:
        held_out = make_rows(training.held_out)
    task = CausalTask(text_tokenizer, make_rows(training.train), held_out, training.empty_documents, training.counts)
    _check(task, recipe)
    return task


def document_rows(recipe: Recipe, stream: corpus.TokenStream, padding_token: int) -> DocumentRows:
    """One document a row, as the recipe wants them padded."""
    arguments = (stream, recipe.batch.sequence_length, padding_token)
    if recipe.data.group_by_length:
        return GroupedDocumentRows(*arguments, global_batch_size=recipe.batch.global_batch_size)
    return DocumentRows(*arguments)


def _check(task: CausalTask, recipe: Recipe) -> None:
    num_rows, num_wanted = len(task.train), recipe.batch.global_batch_size
    if num_rows < num_wanted:
        raise DataError(
            f"{recipe.data.path}: {num_rows} training rows of batch.sequence_length={recipe.batch.sequence_length} are "
            f"fewer than batch.global_batch_size={num_wanted}; give more data, or lower one of the two"
        )
    if task.held_out is not None and not len(task.held_out):
        num_documents = len(task.train.stream.offsets) - 1
        raise DataError(
            f"{recipe.evaluate.path or recipe.data.path}: no document is held out (data.held_out_fraction="
            f"{recipe.data.held_out_fraction:g} of {num_documents} documents, each kept whole); raise the fraction, or "
            "set evaluate.path to a file of its own, or hold nothing out "
            "(data.held_out_fraction=0 evaluate.every_steps=0)"
        )


def _describe(rows: Rows) -> dict[str, int]:
    counts = {
        "rows": len(rows),
        "documents": len(rows.stream.offsets) - 1,
        "tokens": len(rows.stream.tokens),
        "trained_tokens": rows.num_targets,
    }
    if isinstance(rows, SampleRows):
        counts |= {
            "dropped_documents": rows.num_dropped,
            "truncated_documents": rows.num_truncated,
            "truncated_tokens": rows.num_truncated_tokens,
        }
    return counts
