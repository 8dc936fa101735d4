"""A trained causal model that writes: what `generate` and `chat` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.data.chat_encoder import ChatEncoder
from samecurve.data.schemas.conversation import Conversation, Schema
from samecurve.errors import ConfigurationError, DataError
from samecurve.inference import loading
from samecurve.inference.writing import Writing, find_model, is_chat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from samecurve.config.schema import Recipe

Message = dict[str, str]


@dataclass
class Writer:
    """recipe: what trained it, where that is known. chat: whether prompts are turns. ends: ids that stop it."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe | None
    chat: bool
    ends: list[int]

    def ask(self, messages: Sequence[Message]) -> str:
        """The template's text up to where the answer begins. ConfigurationError for a turn that it does not know."""
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja's, and whatever an expression of the template raises
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(f"{self.folder}: its chat template cannot render {roles}: {error}") from error

    def encode(self, texts: Sequence[str], rendered: bool) -> dict[str, Tensor]:
        """(len(texts), longest) input_ids and attention_mask, padded at the front. rendered: by the template, which
        writes the special tokens itself."""
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        encoded = self.tokenizer(
            list(texts), return_tensors="pt", padding=len(texts) > 1, add_special_tokens=not rendered
        )
        return {name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")}

    def write(self, encoded: dict[str, Tensor], how: Writing, streamer=None) -> list[tuple[str, bool]]:
        """For each row (what follows it, whether it ended by itself).

        Raises ConfigurationError where the model has no positions left for what it is asked.
        """
        length = encoded["input_ids"].shape[1]
        room = self.positions - length
        if room < 1:
            raise ConfigurationError(
                f"{length} tokens are asked of a model of {self.positions} positions; shorten that"
            )
        limits = {"max_new_tokens": min(how.max_new_tokens, room), "eos_token_id": self.ends or None}
        limits["pad_token_id"] = self.tokenizer.pad_token_id
        with torch.inference_mode():
            output = self.model.generate(**encoded, **how.options, **limits, streamer=streamer)
        rows = output[:, length:].tolist()
        ended = [any(token in self.ends for token in row) for row in rows]
        return list(zip(self.tokenizer.batch_decode(rows, skip_special_tokens=True), ended, strict=True))

    @property
    def positions(self) -> int:
        found = getattr(self.model.config, "max_position_embeddings", None) or -1
        return found if found > 0 else 1 << 30  # -1 where there is no limit


def load(run: Path, raw: bool = False) -> Writer:
    """The model of a run or a folder, on the device at hand. raw: prompts are text to be continued, never turns.

    Raises ConfigurationError when it is no causal language model.
    """
    folder, recipe = find_model(run)
    model, tokenizer = loading.load(folder)
    chat = not raw and is_chat(recipe, tokenizer)
    return Writer(folder, model.to(loading.device()), tokenizer, recipe, chat, _ends(model, tokenizer, chat))


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """What the model's config, the tokenizer and the chat template each end with: base models' often differ."""
    stored = model.generation_config.eos_token_id
    found = [*(stored if isinstance(stored, list) else [stored]), tokenizer.eos_token_id]
    if chat:
        found.append(_end_of_turn(tokenizer))
    return list(dict.fromkeys(token for token in found if token is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the template writes behind an answer."""
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        text, spans = ChatEncoder(tokenizer, Schema()).render(Conversation("the chat template", said))
    except DataError:  # such a template can be asked, but not trained on
        return None
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    ending = text[: spans[-1][1]].rstrip()
    longest = max((token for token in special if ending.endswith(token)), key=len, default=None)
    return None if longest is None else tokenizer.convert_tokens_to_ids(longest)
