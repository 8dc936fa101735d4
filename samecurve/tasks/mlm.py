"""Masked language modelling: an encoder predicts masked tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from samecurve.data import token_store, tokenizer
from samecurve.data.datasets.text import MaskedRows, Masking
from samecurve.data.encoder import vocabulary_size
from samecurve.data.schemas import classification
from samecurve.errors import DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.heads import Head
from samecurve.tasks import splits

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class MaskedTask(splits.LoadedTask[MaskedRows]):
    """Prediction of masked tokens, with a cross-entropy loss over these tokens."""

    by_token = True

    @property
    def head(self) -> Head:
        return Head("masked_lm", {"pad_token_id": self.tokenizer.pad_token_id})

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return (1,): number of masked tokens that are predicted correctly."""
        return ((logits.argmax(dim=-1) == labels) & (labels != IGNORE_INDEX)).sum().reshape(1)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss in nats per masked token, eval_perplexity, eval_accuracy and eval_tokens.

        eval_accuracy is the fraction of masked tokens that are predicted correctly.
        """
        result.check(self.eval_rows.num_targets, "tokens")
        return {
            "eval_loss": result.loss,
            "eval_perplexity": result.perplexity,
            "eval_accuracy": result.statistics[0] / max(result.tokens, 1),
            "eval_tokens": result.tokens,
        }


def load_task(recipe: Recipe) -> MaskedTask:
    """Load the task.

    Raises:
        DataError: for a tokenizer without a mask token or without a padding token; see also `splits.load_splits`.
    """
    find_source = partial(splits.find_text, recipe)
    text_tokenizer = tokenizer.padding(tokenizer.load_tokenizer(recipe, find_source))
    if text_tokenizer.mask_token_id is None:
        raise DataError(
            f"{text_tokenizer.name_or_path}: the tokenizer has no mask_token; use an encoder's tokenizer, or "
            "name one of its tokens in tokenizer_config.json"
        )
    special = tuple(text_tokenizer.all_special_ids)
    masking = Masking(splits.token_id(text_tokenizer, "mask"), vocabulary_size(text_tokenizer), special)

    def make_rows(stream: token_store.TokenStream) -> MaskedRows:
        return splits.padded_rows(recipe, MaskedRows, stream, splits.token_id(text_tokenizer, "pad"), masking)

    encoder = classification.WholeTextEncoder(text_tokenizer)
    return MaskedTask(text_tokenizer, splits.load_splits(recipe, encoder, find_source, make_rows))
