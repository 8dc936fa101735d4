"""Predictions of non-generative models: classes, rewards, embeddings, masked tokens. Tokenises texts as in training."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from samecurve.config.schema import Data
from samecurve.data import chat_encoder, tokenizer
from samecurve.data.schemas import conversation
from samecurve.data.schemas.classification import Example, ExampleEncoder, text_of
from samecurve.errors import ConfigurationError, DataError
from samecurve.inference import folders, loading
from samecurve.losses import contrastive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from samecurve.config.schema import Recipe
    from samecurve.data.encoder import Encoder

TOP = 5
_MASKS = ("[MASK]", "<mask>")
Asked = tuple[str, "str | dict"]  # (place, for messages; a text or a table's row)
_REWARD = "a reward model scores answers: give --prompt TEXT, or a --file with messages, or with prompt and completion"


@dataclass(frozen=True)
class Read:
    """An input text with its tokens.

    Attributes:
        text: the text as it appears in the answer.
        tokens: token ids, truncated to the predictor's length.
        segments: token type ids for pairs of texts.
        truncated: whether tokens were removed.
    """

    text: str
    tokens: Sequence[int]
    segments: Sequence[int] | None = None
    truncated: bool = False


@dataclass
class Predictor(ABC):
    """A non-generative model and its predictions.

    Attributes:
        folder: folder of the model.
        model: the model in fp32, on the device that computes.
        tokenizer: its tokenizer.
        recipe: recipe of its run, None if unknown.
        prompt: prompt whose answers a reward model scores.
        top: number of candidates per mask of a masked language model.
        data: `data` block of the run, which names the columns of rows.
        length: largest number of tokens of a text.
    """

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    recipe: Recipe | None
    prompt: str | None
    top: int

    @property
    def data(self) -> Data:
        return self.recipe.data if self.recipe else Data()

    @cached_property
    def length(self) -> int:
        if self.recipe:
            return self.recipe.batch.sequence_length
        positions = getattr(self.model.config, "max_position_embeddings", None) or -1
        known = [limit for limit in (positions, self.tokenizer.model_max_length) if 0 < limit < 1 << 30]
        return min(known, default=1024)

    def answers(self, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        """Return one answer per text, in order. Raises DataError for a text that cannot be read."""
        found = [self.read(place, what) for place, what in asked]
        empty = next((place for (place, _), each in zip(asked, found, strict=True) if not len(each.tokens)), None)
        if empty is not None:
            raise DataError(f"{empty}: the tokenizer makes no token of it")
        inputs = self._padded(found)
        with torch.inference_mode():
            output = self.model(**{name: tensor.to(self.model.device) for name, tensor in inputs.items()})
        told = self.tell(output, inputs)
        return [
            {"text": each.text, **what, "truncated": each.truncated} for each, what in zip(found, told, strict=True)
        ]

    @abstractmethod
    def read(self, place: str, found: str | dict) -> Read:
        """Tokenise a text or a row, truncated to `length` tokens. `place` is for messages."""

    @abstractmethod
    def tell(self, output: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Return the prediction for each text from the model's output."""

    def _padded(self, texts: Sequence[Read]) -> dict[str, Tensor]:
        padding = tokenizer.padding(self.tokenizer).pad_token_id
        ids = [torch.as_tensor(each.tokens, dtype=torch.long) for each in texts]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        }
        if texts[0].segments is not None:
            segments = [torch.as_tensor(each.segments, dtype=torch.long) for each in texts]
            inputs["token_type_ids"] = pad_sequence(segments, batch_first=True)
        return inputs

    def _text(self, place: str, found: str | dict) -> str:
        if isinstance(found, dict):
            return text_of(place, "text_column", self._column(found), found)
        if not found.strip():
            raise DataError(f"{place}: the text is empty")
        return found

    def _column(self, row: dict) -> str:
        return self.data.text_column

    def _cut(self, text: str, tokens: Sequence[int]) -> Read:
        return Read(text, tokens[: self.length], truncated=len(tokens) > self.length)


class Classifier(Predictor):
    """Predicts the class of a text or a pair of texts."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        found = self.model.config.id2label
        return tuple(str(found[index]) for index in sorted(found))

    @cached_property
    def encoder(self) -> ExampleEncoder:
        return ExampleEncoder(self.tokenizer, self.length, self.names, self.data.text_pair_column is not None)

    def read(self, place: str, found: str | dict) -> Read:
        column = self.data.text_pair_column
        if column is None:
            return _encoded(self.encoder, Example(place, self._text(place, found), None, self.names[0]))
        if not isinstance(found, dict):
            raise ConfigurationError(
                f"{self.folder}: was trained on pairs of texts; give them by --file, a table with the columns "
                f"{self.data.text_column} and {column}"
            )
        pair = text_of(place, "text_pair_column", column, found)
        return _encoded(self.encoder, Example(place, self._text(place, found), pair, self.names[0]))

    def tell(self, output: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        told = []
        for row in output.logits.float().softmax(dim=-1).tolist():
            best = max(range(len(row)), key=row.__getitem__)
            probabilities = dict(zip(self.names, row, strict=True))
            told.append({"label": self.names[best], "probability": row[best], "probabilities": probabilities})
        return told


class Scorer(Predictor):
    """Predicts the reward of an answer."""

    @cached_property
    def schema(self) -> conversation.ChatSchema:
        chats = self.data.chat if self.recipe else bool(self.tokenizer.chat_template)
        return conversation.ChatSchema(prompt=self.data.prompt_column, chat=chats)

    @cached_property
    def encoder(self) -> Encoder:
        return chat_encoder.encoder(self.tokenizer, self.schema)

    def read(self, place: str, found: str | dict) -> Read:
        said = conversation.conversation(place, self._row(found), self.schema)
        (encoded,) = self.encoder.encode([said])
        return self._cut(str(said.messages[-1].get("content")), encoded.tokens)

    def _row(self, found: str | dict) -> dict:
        if isinstance(found, dict):
            return found
        if self.prompt is None:
            raise ConfigurationError(_REWARD)
        return {self.schema.prompt or "prompt": self.prompt, "completion": found}

    def tell(self, output: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        return [{"score": score} for score in output.logits.float().flatten().tolist()]


class Embedder(Predictor):
    """Computes the embedding of a text, of length 1."""

    @cached_property
    def pooling(self) -> str:
        """Pooling of the run's recipe, or of the export's 1_Pooling/config.json; "mean" if neither is known."""
        if self.recipe:
            return self.recipe.embed.pooling
        path = self.folder / "1_Pooling" / "config.json"
        modes = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        names = {"pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
        return next((name for key, name in names.items() if modes.get(key)), "mean")

    @cached_property
    def encoder(self) -> ExampleEncoder:
        return ExampleEncoder(self.tokenizer, self.length, ("",), pairs=False)

    def read(self, place: str, found: str | dict) -> Read:
        return _encoded(self.encoder, Example(place, self._text(place, found), None, ""))

    def _column(self, row: dict) -> str:
        return self.data.anchor_column if self.data.anchor_column in row else self.data.text_column

    def tell(self, output: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        mask = inputs["attention_mask"].to(self.model.device)
        pooled = contrastive.pool(output.last_hidden_state, mask, self.pooling)
        return [{"embedding": row} for row in torch.nn.functional.normalize(pooled, dim=-1).tolist()]


class Filler(Predictor):
    """Predicts masked tokens. [MASK] and <mask> both stand for the tokenizer's own mask token."""

    def read(self, place: str, found: str | dict) -> Read:
        text, mask = self._text(place, found), self.tokenizer.mask_token_id
        tokens = self.tokenizer(self._masked(text))["input_ids"]
        read = self._cut(text, tokens)
        if mask not in read.tokens:
            where = f" among its first {self.length} tokens" if mask in tokens else ""
            raise DataError(f"{place}: no {_MASKS[0]}{where}; write {_MASKS[0]} for the word that is to be told")
        return read

    def _masked(self, text: str) -> str:
        """Replace all masks by the tokenizer's mask token, without the spaces in front."""
        # A byte-level token includes the space in front of it, so in training a mask hides both.
        for name in {*_MASKS, self.tokenizer.mask_token}:
            text = re.sub(rf" *{re.escape(name)}", lambda _: self.tokenizer.mask_token, text)
        return text

    def tell(self, output: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        probabilities = output.logits.float().softmax(dim=-1)
        is_mask = inputs["input_ids"] == self.tokenizer.mask_token_id
        both = zip(probabilities, is_mask, strict=True)
        return [{"masks": [self._fillers(place) for place in row[mask]]} for row, mask in both]

    def _fillers(self, probabilities: Tensor) -> list[dict[str, Any]]:
        best = probabilities.topk(min(self.top, len(probabilities)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"token": self._shown(token), "probability": value} for token, value in found]

    def _shown(self, token: int) -> str:
        text = self.tokenizer.decode([token])
        return text.strip() or text


def _encoded(encoder: ExampleEncoder, example: Example) -> Read:
    before = sum(encoder.counts.values())
    (found,) = encoder.encode([example])
    text = example.text if example.pair is None else f"{example.text} / {example.pair}"
    return Read(text, found.tokens, found.segments, sum(encoder.counts.values()) > before)


def load(run: Path, prompt: str | None = None, top: int | None = None) -> Predictor:
    """Load the predictor for the model of a run or folder.

    Args:
        run: run directory or model folder.
        prompt: prompt for a reward model, None for other models.
        top: candidates per mask for a masked language model, None for other models.

    Raises:
        ConfigurationError: for a generative model, and for an option that the model does not use.
        CheckpointError: for an adapter whose base model has changed.
    """
    folder, directory = folders.model_folder(run), folders.run_directory(run)
    head, config = loading.stored_head(folder), loading.stored_config(folder)
    kind = "score" if head.kind == "sequence_classification" and config.num_labels == 1 else head.kind
    classes = {"sequence_classification": Classifier, "score": Scorer, "embedding": Embedder, "masked_lm": Filler}
    if kind not in classes:
        raise ConfigurationError(
            f"{folder} holds a language model, which writes: python -m samecurve generate {run}, or chat {run}"
        )
    for name, given, needed in (("prompt", prompt, Scorer), ("top", top, Filler)):
        if given is not None and classes[kind] is not needed:
            what = "a reward model" if needed is Scorer else "a masked language model"
            raise ConfigurationError(f"--{name}: is for {what}, and {folder} holds another one; leave it out")
    recipe, base = folders.recipe(directory) if directory else None, folders.base_path(folder)
    if directory and base:
        loading.check_base(directory, base)
    model, found = loading.load(folder, head)
    return classes[kind](folder, model.to(loading.device()), found, recipe, prompt, TOP if top is None else top)
