"""The base class of a task of the user's own, which a recipe names by import path. See docs/extending.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samecurve.config import own_code
from samecurve.data import sources
from samecurve.data.datasets.packed_samples import PackedSampleRows
from samecurve.data.encoder import Encoded, Encoder, vocabulary_size
from samecurve.errors import ConfigurationError, DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.storage.cache import digest
from samecurve.tasks import causal_lm, splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult


class OwnTask(causal_lm.CausalTask):
    """A causal language model with rows, loss and metrics of your own. Override what differs.

    The loss is a sum over counted units and `count` is their number: the engine divides the sum of a whole optimizer
    step, of all ranks and micro-batches, by the count of that step. So the curve is the same under every strategy,
    provided that `loss` and `count` depend on their arguments alone, row by row.

    Attributes:
        options: `task_options` of the recipe.
        tokenizer: the recipe's tokenizer.
        by_token: set it to True where the loss is a sum over trained tokens of which each is computed from its own
            logits and label. Then it may be computed a few tokens at a time, see `loss.implementation`.
    """

    by_token = False
    counts = "units"

    def __init__(self, recipe: Recipe):
        """Load tokenizer and rows. Raises as `causal_lm.load_causal_task` does."""
        self.recipe, self.options = recipe, recipe.task_options

        def find_source(data: Data) -> sources.DataSource:
            selection = sources.Selection.of(recipe, data)
            base = sources.find_source(splits.path_of(data), data.pattern, data.text_column, selection)
            return _RowSource(base.name, base.files, base.text_column, task=self, selection=selection)

        self.tokenizer = causal_lm.load_tokenizer(recipe, find_source)
        encoder = _RowEncoder(self.tokenizer, self)
        packed = partial(PackedSampleRows, truncation=recipe.data.truncation)
        loaded = causal_lm.load_causal_task(recipe, self.tokenizer, encoder, find_source, packed)
        self.splits, self.details = loaded.splits, loaded.details

    def texts(self, row: dict[str, Any]) -> list[str]:
        """Return the texts of a row that a tokenizer is trained on (`tokenizer.vocabulary_size`)."""
        return [value for value in row.values() if isinstance(value, str)]

    def encode(self, row: dict[str, Any]) -> tuple[Sequence[int], Sequence[bool]]:
        """Turn a row of the data into token ids, and say of each whether it is a target. [] leaves the row out."""
        ids = self.tokenizer(row[self.recipe.data.text_column], add_special_tokens=False)["input_ids"]
        ids = [*ids, splits.token_id(self.tokenizer, "eos")]
        return ids, [True] * len(ids)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return the `eval_*` values: from `result.loss`, per unit, and `result.statistics`, the sums of all rows."""
        return {"eval_loss": result.loss}


def load_task(recipe: Recipe) -> OwnTask:
    """Load the task that the recipe names by its import path.

    Raises:
        ConfigurationError: see `own_code.load`; or it names something else than a subclass of OwnTask, or its loss is
            not a sum.
    """
    task_class = own_code.load(recipe.task, "task")
    own_code.check_subclass(recipe.task, "task", task_class, OwnTask)
    task = task_class(recipe)
    _check_loss(task)
    return task


def _check_loss(task: OwnTask) -> None:
    """Raise ConfigurationError unless loss and count of two made-up rows are those of both rows added up."""
    draw, size = torch.Generator().manual_seed(0), task.vocabulary_size
    logits = torch.randn(2, 4, size, generator=draw).requires_grad_()
    labels = torch.randint(size, (2, 4), generator=draw)
    labels[0, 1:3] = IGNORE_INDEX  # rows of different numbers of trained tokens
    pieces, piece = [(logits[:1], labels[:1]), (logits[1:], labels[1:])], "row"
    if task.by_token:
        trained = labels != IGNORE_INDEX
        pieces, piece = [*zip(logits[trained].split(1), labels[trained].split(1), strict=True)], "token"
    try:
        whole, parts = task.loss(logits, labels), [task.loss(*given) for given in pieces]
        counts = task.count(labels), sum(task.count(label) for _, label in pieces)
    except Exception as error:  # of any type: this runs the user's code
        raise ConfigurationError(
            f"task: {task.recipe.task} failed with {type(error).__name__} on logits of shape (2, 4, {size}) or a part "
            f"of them and labels without their last axis: {error}"
        ) from error
    if not isinstance(whole, torch.Tensor) or whole.dim() or whole.dtype != torch.float32 or not whole.requires_grad:
        shown = f"{whole.dtype} of shape {(*whole.shape,)}" if isinstance(whole, torch.Tensor) else repr(whole)
        raise ConfigurationError(
            f"task: {task.recipe.task}: loss returned {shown:.80}, expected an fp32 scalar with a gradient"
        )
    added = sum(parts)
    if not torch.allclose(whole, torch.as_tensor(added), rtol=1e-3) or counts[0] != counts[1]:
        raise ConfigurationError(
            f"task: {task.recipe.task}: loss / count of 2 rows at once is {whole:.6g} / {counts[0]}, but added up "
            f"{piece} by {piece} {added:.6g} / {counts[1]}, so the curve would depend on the micro-batch and the "
            "number of processes; return sums, never means, and let count say over how many"
            + (", or set by_token to False" if task.by_token else "")
        )


@dataclass(frozen=True)
class _Row:
    """A row of the data. Its text as JSON decides whether it is held out."""

    place: str
    row: dict[str, Any]

    def __str__(self) -> str:
        return json.dumps(self.row, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class _RowSource(sources.DataSource):
    """Rows as they are. A text file is one row, whose text is under `text_column`."""

    task: OwnTask = field(kw_only=True)

    def read(self, place: str, row: dict) -> _Row:
        return _Row(place, row)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        return tuple(row)

    def texts(self, document: _Row) -> list[str]:
        return self.task.texts(document.row)


class _RowEncoder(Encoder):
    """Calls the task's `encode`. Tokens are cached until the task's module or its options change."""

    masked = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: OwnTask):
        super().__init__(tokenizer)
        self._task, self._num_ids = task, vocabulary_size(tokenizer)
        code = own_code.source_hash(task.recipe.task)
        self.identity = digest(self.identity, task.recipe.task, code, task.options, task.recipe.data.text_column)

    def encode(self, documents: list[_Row]) -> list[Encoded]:
        name, encoded = f"{type(self._task).__name__}.encode", []
        for document in documents:
            try:
                tokens, trained = self._task.encode(document.row)
                tokens, trained = [int(token) for token in tokens], np.array(trained, dtype=bool)
            except Exception as error:  # of any type: this runs the user's code
                raise DataError(f"{document.place}: {name} failed with {type(error).__name__}: {error}") from error
            wrong = next((token for token in tokens if not 0 <= token < self._num_ids), None)
            if wrong is not None:
                raise DataError(f"{document.place}: {name} returned {wrong}, but ids end at {self._num_ids - 1}")
            if len(tokens) != len(trained):
                text = f"{name} returned {len(tokens)} tokens, but {len(trained)} marks; return one mark per token"
                raise DataError(f"{document.place}: {text}")
            encoded.append(Encoded(tokens, trained))
        return encoded
