"""Contrastive text embeddings (InfoNCE) with in-batch negatives from the whole global batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.retrieval import RetrievalRows
from samecurve.data.find import find_matches
from samecurve.data.schemas import retrieval
from samecurve.errors import ConfigurationError
from samecurve.interfaces.task import MomentumQueue
from samecurve.losses import contrastive
from samecurve.losses.cross_entropy import count_trained
from samecurve.specs.heads import Head
from samecurve.storage.atomic import write_json
from samecurve.tasks import splits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult

_DEPTH = 10  # cutoff of the mean reciprocal rank, as in the BEIR and MS MARCO benchmarks


@dataclass
class EmbedTask(splits.LoadedTask[RetrievalRows]):
    """InfoNCE loss over anchors, positives and hard negatives.

    The positives and negatives of all rows serve as negatives of every row. So a row's loss needs the embeddings of the
    whole global batch, which `context` provides (gradient caching, see `Task`). With `embed.queue`, they and earlier
    positives are embedded by a momentum encoder.
    """

    recipe: Recipe
    counts = "rows"

    @property
    def head(self) -> Head:
        return Head("embedding", {"pad_token_id": self.tokenizer.pad_token_id})

    def outputs(self, output: Any) -> Tensor:
        return output.last_hidden_state

    def features(self, states: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        """Pool `states`, (sequences, sequence_length, embedding size), to unit vectors.

        Returns:
            (rows, sequences per row * embedding size), fp32.
        """
        pooled = contrastive.pool(states, attention_mask, self.recipe.embed.pooling)
        return functional.normalize(pooled, dim=-1).reshape(len(labels), -1)

    @property
    def momentum_queue(self) -> MomentumQueue | None:
        settings = self.recipe.embed
        return MomentumQueue(settings.queue, settings.momentum) if settings.queue else None

    def context(self, features: Tensor, keys: Tensor | None = None, queue: Tensor | None = None) -> dict[str, Tensor]:
        embeddings, temperature = self._embeddings(features, self.train), self.recipe.embed.temperature
        if keys is None or queue is None:
            row_loss, gradient = contrastive.info_nce_context(embeddings, temperature)
            return {"row_loss": row_loss, "gradient": gradient.flatten(1)}
        # of the anchors alone: all other texts are the momentum encoder's
        others = self._embeddings(keys, self.train)[:, 1:]
        row_loss, of_anchors = contrastive.momentum_context(embeddings[:, 0], others, queue, temperature)
        gradient = torch.zeros_like(embeddings)
        gradient[:, 0] = of_anchors
        return {"row_loss": row_loss, "gradient": gradient.flatten(1), "queued": others[:, 0]}

    def loss(
        self, states: Tensor, labels: Tensor, attention_mask: Tensor, row_loss: Tensor, gradient: Tensor
    ) -> Tensor:
        # `context` has computed the losses and their gradient with respect to these rows' embeddings. The linear term
        # adds 0 to the value and that gradient to the backward pass.
        linear = (self.features(states, labels, attention_mask) * gradient).sum()
        return row_loss.sum() + (linear - linear.detach())

    def count(self, labels: Tensor, attention_mask: Tensor) -> int:
        return count_trained(labels)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return the loss and the retrieval metrics of the validation rows.

        Returns:
            eval_loss: nats per row, computed on batches of global_batch_size rows in their order.
            eval_accuracy_at_k (k = 1, 5): fraction of anchors whose positive is among the k nearest of all distinct
                validation positives and negatives.
            eval_mrr_at_10: mean reciprocal rank of the positive among them; 0 for ranks above 10.
            eval_rows: number of rows.
        """
        result.check(len(self.eval_rows), "rows")
        assert result.features is not None  # as the task has a `context`
        # padding rows come last
        embeddings = self._embeddings(result.features[: result.tokens], self.eval_rows)
        batch, temperature = self.recipe.batch.global_batch_size, self.recipe.embed.temperature
        loss = sum(contrastive.info_nce(rows, temperature).double().sum().item() for rows in embeddings.split(batch))
        ranks = contrastive.ranks(embeddings, self.eval_rows.candidates()).double()
        return {
            "eval_loss": loss / result.tokens,
            "eval_accuracy_at_1": (ranks <= 1).double().mean().item(),
            "eval_accuracy_at_5": (ranks <= 5).double().mean().item(),
            f"eval_mrr_at_{_DEPTH}": ((ranks <= _DEPTH) / ranks).mean().item(),
            "eval_rows": result.tokens,
        }

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "sequences_per_row": self.train.num_sequences}

    def save_task_files(self, directory: Path, config: PreTrainedConfig) -> None:
        """Write the files that sentence-transformers needs to load the export: modules, pooling, similarity."""
        modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
        listed = [
            {"idx": nth, "name": str(nth), "path": path, "type": f"sentence_transformers.models.{name}"}
            for nth, (name, path) in enumerate(modules)
        ]
        (directory / "modules.json").write_text(json.dumps(listed, indent=2))
        for _, path in modules[1:]:
            (directory / path).mkdir()
        names = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
        modes = {f"pooling_mode_{name}": key == self.recipe.embed.pooling for key, name in names.items()}
        write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": config.hidden_size, **modes})
        write_json(directory / "2_Normalize" / "config.json", {})
        length = {"max_seq_length": self.recipe.batch.sequence_length, "do_lower_case": False}
        write_json(directory / "sentence_bert_config.json", length)
        write_json(directory / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})

    def _embeddings(self, features: Tensor, rows: RetrievalRows) -> Tensor:
        """Reshape features to (rows, sequences per row, embedding size)."""
        return features.unflatten(1, (rows.num_sequences, -1))


def load_task(recipe: Recipe) -> EmbedTask:
    """Load the task.

    Raises:
        DataError: for a tokenizer without a padding token; see also `splits.load_splits`.
        ConfigurationError: for more rows in the queue and a step than there are.
    """

    def find_source(data: Data) -> sources.DataSource:
        return find_matches(splits.path_of(data), data, sources.Selection.of(recipe, data))

    text_tokenizer = tokenizer.padding(tokenizer.load_tokenizer(recipe, find_source))
    length = recipe.batch.sequence_length

    def make_rows(stream: token_store.TokenStream) -> RetrievalRows:
        return splits.padded_rows(recipe, RetrievalRows, stream, splits.token_id(text_tokenizer, "pad"))

    encoder = retrieval.MatchEncoder(text_tokenizer, length, recipe.data.truncation)
    task = EmbedTask(text_tokenizer, splits.load_splits(recipe, encoder, find_source, make_rows), recipe)
    most = len(task.train) - recipe.batch.global_batch_size
    if recipe.embed.queue > max(most, 0):
        raise ConfigurationError(
            f"embed.queue: found {recipe.embed.queue:,}, but of {len(task.train):,} training rows a step has "
            f"{recipe.batch.global_batch_size:,}: each anchor would meet its own positive among the negatives; "
            f"set it to {max(most, 0):,} or less"
        )
    return task
