"""Base of the encoders of conversations, and the encoder of prompts and completions without a chat template."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.encoder import Encoded, Encoder, vocabulary_size
from samecurve.data.schemas.conversation import ChatSchema, Conversation
from samecurve.errors import DataError
from samecurve.specs.data_names import WEIGHT_UNITS
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
# Part of the cache key: raise it when the same texts give other tokens or other trained marks.
_VERSION = 2


class ConversationEncoder(Encoder):
    """Base of the encoders of conversations. Rows that are tokenised already are taken as they are."""

    masked = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        super().__init__(tokenizer)
        self._num_ids = vocabulary_size(tokenizer)

    def encode(self, documents: list[Conversation]) -> list[Encoded]:
        said = [document for document in documents if document.messages]
        encoded = iter(self.encode_texts(said) if said else ())
        results = []
        for document in documents:
            if document.messages:
                results.append(next(encoded))
                continue
            if document.segments:  # their special tokens are meant, as axolotl's tokenizer reads them
                as_text, self._rust.encode_special_tokens = self._rust.encode_special_tokens, False
                parts = self._rust.encode_batch(document.segments, add_special_tokens=False)
                self._rust.encode_special_tokens = as_text
                tokens = [token for part in parts for token in part.ids]
                marks = np.repeat(np.array(document.trained, dtype=bool), [len(part) for part in parts])
                weights = np.ones(len(marks), np.float32) if self.weighted else None
                results.append(Encoded(tokens, marks, weights=weights))
                continue
            tokens = document.tokens or ()
            wrong = next((token for token in tokens if not 0 <= token < self._num_ids), None)
            if wrong is not None:
                raise DataError(
                    f"{document.place}: 'input_ids' has {wrong}, but the tokenizer's ids end at {self._num_ids - 1}; "
                    "use the tokenizer that made the rows"
                )
            weights = weights_of(document.weights or [1.0] * len(tokens)) if self.weighted else None
            results.append(Encoded(tokens, np.array(document.trained, dtype=bool), weights=weights))
        return results

    @abstractmethod
    def encode_texts(self, documents: list[Conversation]) -> list[Encoded]:
        """Encode conversations that have messages. Raises DataError for one that cannot be encoded."""


class TextEncoder(ConversationEncoder):
    """Encodes [begin-of-text] prompt completion end-of-text without a template, for data.chat=false.

    The prompt is trained only with train_on="all". Special tokens within the texts are encoded as text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, schema: ChatSchema):
        super().__init__(tokenizer)
        from tokenizers import processors

        self.schema, self.weighted = schema, schema.weighted
        self._rust.post_processor = processors.Sequence([])
        self.identity = digest(_VERSION, self.identity, "text", schema.train_on)

    def encode_texts(self, documents: list[Conversation]) -> list[Encoded]:
        rendered = [self.render(document) for document in documents]
        self._count_special(text for text, _ in rendered)
        encodings = self._rust.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        encoded = []
        for encoding, (_, spans) in zip(encodings, rendered, strict=True):
            begin, end = np.zeros(len(self._begin), dtype=bool), np.ones(len(self._end), dtype=bool)
            marks = [begin, overlap(np.array(encoding.offsets), spans), end]
            ids = [*self._begin, *encoding.ids, *self._end]
            weights = np.ones(len(ids), np.float32) if self.weighted else None
            encoded.append(Encoded(ids, np.concatenate(marks), weights=weights))
        return encoded

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return prompt and completion as one text, and its trained character range."""
        prompt, completion = (message["content"] for message in conversation.messages)
        text = prompt + completion
        return text, [(0 if self.schema.train_on == "all" else len(prompt), len(text))]


def weights_of(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Round weights to the units in which they are counted, see Counts: float32."""
    return (np.rint(np.asarray(values, np.float32).astype(np.float64) * WEIGHT_UNITS) / WEIGHT_UNITS).astype(np.float32)


def overlap(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Mark tokens with a character in a span: (num_tokens,) bool. `offsets`, (num_tokens, 2), are character ranges."""
    starts, ends = offsets.reshape(-1, 2).T  # without a token, the array is (0,)
    marked = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        marked |= (ends > start) & (starts < end)
    return marked
