"""Predictions of non-generative models: classes, rewards, embeddings, masked tokens. Tokenises texts as in training."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from samecurve.config.adapter_folder import base_path
from samecurve.config.schema import Data, Pooling
from samecurve.data import chat_encoder, tokenizer
from samecurve.data.schemas import conversation
from samecurve.data.schemas.classification import Example, ExampleEncoder, text_of
from samecurve.data.schemas.token_labels import LabelledWords, StepEncoder, WordEncoder, words_of
from samecurve.errors import ConfigurationError, DataError
from samecurve.inference import folders, loading
from samecurve.losses import contrastive
from samecurve.specs.data_names import Truncation
from samecurve.storage.records import read_record

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from samecurve.config.schema import Recipe
    from samecurve.data.encoder import Encoder

TOP = 5
_MASKS = ("[MASK]", "<mask>")
Source = tuple[str, "str | dict"]  # (place, for messages; a text or a table's row)


@dataclass(frozen=True)
class EncodedText:
    """An input text with its tokens.

    Attributes:
        text: the text as it appears in the answer.
        tokens: token ids, truncated to the predictor's length.
        segments: token type ids for pairs of texts.
        truncated: whether tokens were removed.
        places: by words, or steps, with a class of their own: the token that has it.
    """

    text: str
    tokens: Sequence[int] | np.ndarray
    segments: Sequence[int] | np.ndarray | None = None
    truncated: bool = False
    places: Sequence[tuple[str, int]] = ()


@dataclass
class Predictor(ABC):
    """A non-generative model and its predictions.

    Attributes:
        folder: folder of the model.
        model: the model in its --precision, on the device that computes.
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
        # transformers gives 1e30 for a tokenizer without a limit
        known = [limit for limit in (positions, self.tokenizer.model_max_length) if 0 < limit < 1 << 30]
        return min(known, default=1024)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return loading.class_names(self.model.config)

    def predict(self, sources: Sequence[Source]) -> list[dict[str, Any]]:
        """Return one prediction per text, in order. Raises DataError for a text that cannot be read."""
        texts = [self.encode(place, source) for place, source in sources]
        empty = next((place for (place, _), text in zip(sources, texts, strict=True) if not len(text.tokens)), None)
        if empty is not None:
            raise DataError(f"{empty}: the tokenizer produces no tokens for this text; remove it")
        padding = tokenizer.padding(self.tokenizer).pad_token_id
        assert isinstance(padding, int)  # `padding` raises for a tokenizer without one
        ids = [torch.as_tensor(text.tokens, dtype=torch.long) for text in texts]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence([torch.ones_like(tokens) for tokens in ids], batch_first=True),
        }
        if texts[0].segments is not None:
            segments = [torch.as_tensor(text.segments, dtype=torch.long) for text in texts]
            inputs["token_type_ids"] = pad_sequence(segments, batch_first=True)
        with torch.inference_mode():
            output = self.model(**{name: tensor.to(self.model.device) for name, tensor in inputs.items()})
        pairs = zip(texts, self.decode(output, inputs, texts), strict=True)
        return [{"text": text.text, **prediction, "truncated": text.truncated} for text, prediction in pairs]

    @abstractmethod
    def encode(self, place: str, source: str | dict) -> EncodedText:
        """Tokenise a text or a table's row, truncated to `length` tokens. `place` is for messages."""

    @abstractmethod
    def decode(self, output: Any, inputs: dict[str, Tensor], texts: Sequence[EncodedText]) -> list[dict[str, Any]]:
        """Return the prediction for each text, from the model's output."""

    def _text(self, place: str, source: str | dict) -> str:
        if isinstance(source, dict):
            return text_of(place, self._column(source), source)
        if not source.strip():
            raise DataError(f"{place}: the text is empty")
        return source

    def _column(self, row: dict) -> str:
        return self.data.text_column

    @property
    def _side(self) -> Truncation:
        """The side that is cut off of a text that is too long: none is left out or refused."""
        return "left" if self.data.truncation == "left" else "right"

    def _truncate(self, text: str, tokens: Sequence[int] | np.ndarray) -> EncodedText:
        return EncodedText(text, tokens[: self.length], truncated=len(tokens) > self.length)


class Classifier(Predictor):
    """Predicts the class of a text or a pair of texts, several classes, a number, or a probability."""

    @cached_property
    def encoder(self) -> ExampleEncoder:
        pairs = self.data.text_pair_column is not None
        return ExampleEncoder(self.tokenizer, self.length, self.names, pairs, self._side)

    def encode(self, place: str, source: str | dict) -> EncodedText:
        column, pair = self.data.text_pair_column, None
        if column is not None:
            if not isinstance(source, dict):
                raise ConfigurationError(
                    f"{self.folder}: the model classifies pairs of texts; give --file FILE, a table with the columns "
                    f"{self.data.text_column} and {column}"
                )
            pair = text_of(place, column, source)
        return _encoded(self.encoder, Example(place, self._text(place, source), pair, self.names[0]))

    def decode(self, output: Any, inputs: dict[str, Tensor], texts: Sequence[EncodedText]) -> list[dict[str, Any]]:
        problem, logits = self.model.config.problem_type, output.logits.float()
        if problem == "regression":
            return [{"score": score} for score in logits[:, 0].tolist()]
        if problem == "multi_label_classification":
            rows = logits.sigmoid().tolist()
            if len(self.names) == 1:
                return [{"score": score} for (score,) in rows]
            named = [dict(zip(self.names, row, strict=True)) for row in rows]
            return [{"labels": [n for n, p in row.items() if p > 0.5], "probabilities": row} for row in named]
        predictions = []
        for row in logits.softmax(dim=-1).tolist():
            best = max(range(len(row)), key=row.__getitem__)
            probabilities = dict(zip(self.names, row, strict=True))
            predictions.append({"label": self.names[best], "probability": row[best], "probabilities": probabilities})
        return predictions


class WordClassifier(Predictor):
    """Predicts the class of each word of a text, or of each step of a solution."""

    @cached_property
    def encoder(self) -> WordEncoder:
        if self.recipe and self.recipe.task == "process_reward":
            return StepEncoder(self.tokenizer, self.length, self.recipe.process_reward.step_separator, self._side)
        return WordEncoder(self.tokenizer, self.length, self.names, self._side)

    def encode(self, place: str, source: str | dict) -> EncodedText:
        prompt = None
        if isinstance(self.encoder, StepEncoder):
            if not isinstance(source, dict):
                columns = f"{self.data.text_column} and {self.data.words_column}"
                raise ConfigurationError(
                    f"{self.folder}: the model judges steps; give --file FILE, a table with the columns {columns}"
                )
            prompt = text_of(place, self.data.text_column, source)
        words = words_of(place, self.data.words_column, source) if isinstance(source, dict) else tuple(source.split())
        if not words:
            raise DataError(f"{place}: the text is empty")
        ((ids, places, is_longer),) = self.encoder.placed([LabelledWords(place, words, (), prompt)])
        named = [(words[index], position) for index, position in places.items()]
        return EncodedText(" ".join(words), ids, truncated=is_longer, places=named)

    def decode(self, output: Any, inputs: dict[str, Tensor], texts: Sequence[EncodedText]) -> list[dict[str, Any]]:
        answers = []
        for row, text in zip(output.logits.float().softmax(dim=-1).tolist(), texts, strict=True):
            words = []
            for word, position in text.places:
                best = max(range(len(self.names)), key=row[position].__getitem__)
                words.append({"word": word, "label": self.names[best], "probability": row[position][best]})
            answers.append({"words": words})
        return answers


class Scorer(Predictor):
    """Predicts the reward of an answer."""

    @cached_property
    def schema(self) -> conversation.ChatSchema:
        chats = self.data.chat if self.recipe else bool(self.tokenizer.chat_template)
        variables = self.data.chat_template_kwargs
        return conversation.ChatSchema(prompt=self.data.prompt_column, chat=chats, template_kwargs=variables)

    @cached_property
    def encoder(self) -> Encoder:
        date = self.recipe.tokenizer.template_date if self.recipe else None
        return chat_encoder.encoder(self.tokenizer, self.schema, date, splits=False)

    def encode(self, place: str, source: str | dict) -> EncodedText:
        if not isinstance(source, dict):
            if self.prompt is None:
                raise ConfigurationError(
                    "--prompt: a reward model scores answers to a prompt; give --prompt TEXT, or a --file with "
                    "messages, or with prompt and completion"
                )
            source = {self.schema.prompt or "prompt": self.prompt, "completion": source}
        turns = conversation.conversation(place, source, self.schema)
        (encoded,) = self.encoder.encode([turns])
        text = self._truncate(str(turns.messages[-1].get("content")), encoded.tokens)
        return replace(text, tokens=encoded.tokens[-self.length :]) if self.data.truncation == "left" else text

    def decode(self, output: Any, inputs: dict[str, Tensor], texts: Sequence[EncodedText]) -> list[dict[str, Any]]:
        return [{"score": score} for score in output.logits.float().flatten().tolist()]


class Embedder(Predictor):
    """Computes the embedding of a text, of length 1."""

    @cached_property
    def pooling(self) -> Pooling:
        """Pooling of the run's recipe, or of the export's 1_Pooling/config.json; "mean" if neither is known."""
        if self.recipe:
            return self.recipe.embed.pooling
        listed = read_record(self.folder / "modules.json", contrastive.MODULES)
        contrastive.check_modules(str(self.folder), listed.optional(ConfigurationError, "restore it"))
        path = self.folder / "1_Pooling" / "config.json"
        modes = read_record(path).optional(ConfigurationError, "restore it")
        return contrastive.stated_pooling(str(self.folder), modes)

    @cached_property
    def encoder(self) -> ExampleEncoder:
        return ExampleEncoder(self.tokenizer, self.length, ("",), False, self._side)

    def encode(self, place: str, source: str | dict) -> EncodedText:
        return _encoded(self.encoder, Example(place, self._text(place, source), None, ""))

    def _column(self, row: dict) -> str:
        return self.data.anchor_column if self.data.anchor_column in row else self.data.text_column

    def decode(self, output: Any, inputs: dict[str, Tensor], texts: Sequence[EncodedText]) -> list[dict[str, Any]]:
        mask = inputs["attention_mask"].to(self.model.device)
        pooled = contrastive.pool(output.last_hidden_state.float(), mask, self.pooling)
        return [{"embedding": row} for row in torch.nn.functional.normalize(pooled, dim=-1).tolist()]


class MaskFiller(Predictor):
    """Predicts masked tokens. [MASK] and <mask> both stand for the tokenizer's own mask token."""

    @cached_property
    def mask(self) -> tuple[str, int]:
        """The tokenizer's mask token and its id."""
        token, number = self.tokenizer.mask_token, self.tokenizer.mask_token_id
        if not isinstance(token, str) or not isinstance(number, int):
            raise ConfigurationError(f"{self.folder}: the tokenizer has no mask token; set mask_token in its config")
        return token, number

    def encode(self, place: str, source: str | dict) -> EncodedText:
        text, (mask, mask_id) = self._text(place, source), self.mask
        # A byte-level token includes the space in front of it, so in training a mask hides both.
        any_mask = "|".join(map(re.escape, {*_MASKS, mask}))
        tokens = self.tokenizer(re.sub(rf" *(?:{any_mask})", lambda _: mask, text))["input_ids"]
        encoded = self._truncate(text, tokens)
        if mask_id not in encoded.tokens:
            where = f" among its first {self.length} tokens" if mask_id in tokens else ""
            raise DataError(f"{place}: no {_MASKS[0]}{where}; write {_MASKS[0]} in place of the word to predict")
        return encoded

    def decode(self, output: Any, inputs: dict[str, Tensor], texts: Sequence[EncodedText]) -> list[dict[str, Any]]:
        predictions = []
        is_mask = inputs["input_ids"].eq(self.mask[1])
        for row, mask in zip(output.logits.float().softmax(dim=-1), is_mask, strict=True):
            masks = []
            for probabilities in row[mask]:
                best = probabilities.topk(min(self.top, len(probabilities)))
                candidates = self.tokenizer.batch_decode([[token] for token in best.indices.tolist()])
                pairs = zip(candidates, best.values.tolist(), strict=True)
                # without the space that a byte-level token includes; a token of spaces alone stays as it is
                masks.append([{"token": text.strip() or text, "probability": value} for text, value in pairs])
            predictions.append({"masks": masks})
        return predictions


def _encoded(encoder: ExampleEncoder, example: Example) -> EncodedText:
    before = sum(encoder.counts.values())  # of texts that were truncated
    (encoded,) = encoder.encode([example])
    text = example.text if example.pair is None else f"{example.text} / {example.pair}"
    return EncodedText(text, encoded.tokens, encoded.segments, sum(encoder.counts.values()) > before)


def load_predictor(
    run: Path,
    prompt: str | None = None,
    top: int | None = None,
    trust_remote_code: bool = False,
    precision: str | None = None,
) -> Predictor:
    """Load the predictor for the model of a run or folder.

    `prompt` is for reward models, `top`, the candidates per mask, for masked language models; others take None. For
    `precision` see `loading.inference_dtype`.

    Raises:
        ConfigurationError: for a generative model, and for an option that the model does not use.
        CheckpointError: for an adapter whose base model has changed.
    """
    folder = folders.model_folder(run)
    head, config = loading.stored_head(folder, trust_remote_code), loading.stored_config(folder, trust_remote_code)
    is_score = config.num_labels == 1 and config.problem_type is None  # an own task `classify` has a problem_type
    kind = "score" if head.kind == "sequence_classification" and is_score else head.kind
    classes = {"sequence_classification": Classifier, "score": Scorer, "embedding": Embedder, "masked_lm": MaskFiller}
    classes["token_classification"] = WordClassifier
    if kind not in classes:
        raise ConfigurationError(
            f"{folder}: the model generates text; use python -m samecurve generate {run}, or chat {run}"
        )
    for name, given, needed in (("prompt", prompt, Scorer), ("top_k", top, MaskFiller)):
        if given is not None and classes[kind] is not needed:
            what = "a reward model" if needed is Scorer else "a masked language model"
            raise ConfigurationError(f"--{name}: only for {what}, which {folder} is not; leave the option out")
    recipe = folders.known_recipe(run)
    loading.check_base_model(run, base_path(folder))
    dtype = loading.inference_dtype(precision, recipe)
    model, tokens = loading.load_with_tokenizer(folder, head, trust_remote_code=trust_remote_code, dtype=dtype)
    return classes[kind](folder, loading.to_default_device(model), tokens, recipe, prompt, TOP if top is None else top)
