"""Base of the tasks that train a causal language model on tokens: loss, metrics and data loading."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.base import Rows
from samecurve.data.encoder import Encoder
from samecurve.errors import DataError
from samecurve.models.hf_config import Head
from samecurve.tasks import splits, streaming_splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class CausalTask(splits.LoadedTask[Rows]):
    """Next-token prediction, for pretraining and fine-tuning.

    Attributes:
        details: further entries of `describe`, about the data.
    """

    head = Head()
    by_token = True
    details: dict[str, object] = field(default_factory=dict)

    @property
    def special_tokens(self) -> dict[str, int]:
        # Without pad_token_id: the config of a causal language model needs none.
        return {name: getattr(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id")}

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss in nats per token, eval_perplexity, eval_bits_per_byte and eval_tokens.

        Bits per byte are comparable between tokenizers of different vocabularies.
        """
        if result.tokens != self.eval_rows.num_targets:
            raise DataError(
                f"{result.tokens} validation tokens were evaluated, but the data have {self.eval_rows.num_targets}"
            )
        return {
            "eval_loss": result.loss,
            "eval_perplexity": math.exp(min(result.loss, 700.0)),  # exp(710) overflows a float.
            "eval_bits_per_byte": result.loss * result.tokens / math.log(2) / self._num_eval_bytes,
            "eval_tokens": result.tokens,
        }

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **self.details}

    @cached_property
    def _num_eval_bytes(self) -> int:
        return self.eval_rows.target_bytes(tokenizer.byte_lengths(self.tokenizer))


def load_causal_task(
    recipe: Recipe,
    text_tokenizer: PreTrainedTokenizerFast,
    encoder: Encoder,
    find_source: Callable[[Data], sources.DataSource],
    make_rows: Callable[[token_store.TokenStream], Rows],
) -> CausalTask:
    """Load the rows of one data set, a mixture or a stream. Arguments and errors: see `splits.load_splits`."""
    if recipe.data.streaming:
        loaded = streaming_splits.load_stream(recipe, encoder, make_rows)
    else:
        loaded = splits.load_splits(recipe, encoder, find_source, make_rows)
    return CausalTask(text_tokenizer, loaded, splits.describe_sources(recipe, loaded))


def load_tokenizer(recipe: Recipe, find_source: Callable[[Data], sources.DataSource]) -> PreTrainedTokenizerFast:
    """Load the recipe's tokenizer, or train it on all training documents. Raises as `tokenizer.load_tokenizer` does."""
    return tokenizer.load_tokenizer(recipe, lambda data: splits.find_all_sources(recipe, find_source))
