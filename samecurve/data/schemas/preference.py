"""Preference pairs in tables: TRL's schema (`prompt`, `chosen` and `rejected`), or columns named in the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.data import sources
from samecurve.data.chat_encoder import encoder
from samecurve.data.encoder import Encoded, Encoder
from samecurve.data.formats import no_column
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.conversation import ChatSchema, Conversation, Turns, tools_of, turns, with_system
from samecurve.data.schemas.messages import shown
from samecurve.errors import DataError
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data

# Part of the cache key: raise it when the same pair gives other tokens or other trained marks.
_VERSION = 1


@dataclass(frozen=True)
class PairSchema:
    """Columns of a preference pair.

    Attributes:
        prompt: column of the prompt. None: `prompt` if a row has it; else both answers begin with the prompt.
        chosen: column of the better answer.
        rejected: column of the worse answer.
        chat: whether texts become turns of a chat; otherwise they are concatenated without a template.
    """

    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    chat: bool = True

    @classmethod
    def of(cls, data: Data) -> PairSchema:
        return cls(data.prompt_column, data.chosen_column, data.rejected_column, data.chat)


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt. Its str() is their content without the place."""

    chosen: Conversation
    rejected: Conversation

    @property
    def place(self) -> str:
        return self.chosen.place

    def __str__(self) -> str:
        return f"{self.chosen}\0{self.rejected}"


@dataclass(frozen=True)
class PairSource(sources.TableSource):
    """Tables whose rows are preference pairs."""

    documents_are, a_line_is = "preference pairs", "one pair of answers"
    columns_are_named_by = "data.prompt_column, data.chosen_column and data.rejected_column"

    schema: PairSchema = PairSchema()

    @property
    def identity(self) -> str:
        return json.dumps(asdict(self.schema), sort_keys=True)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        answers, system = (self.schema.chosen, self.schema.rejected), ["system"] if self.schema.chat else []
        return (self.schema.prompt or "prompt", *answers, "tools", *system)

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        wanted = {"chosen_column": self.schema.chosen, "rejected_column": self.schema.rejected}
        prompt = nearest(row, {"prompt_column": self.schema.prompt or "prompt"})
        if row.keys() >= set(wanted.values()):
            yield prompt
        else:
            yield nearest(row, wanted)
            yield prompt and prompt | nearest(row, wanted)

    def reading(self, keys: dict[str, str]) -> PairSource:
        changes = {key.removesuffix("_column"): column for key, column in keys.items()}
        return replace(self, schema=replace(self.schema, **changes))

    def texts(self, document: Pair) -> list[str]:
        # the prompt only once, as both answers have it
        messages = (*document.chosen.messages, *document.rejected.messages[document.rejected.num_prompt :])
        return [message["content"] for message in messages if message.get("content")]

    def read(self, place: str, row: dict) -> Pair:
        return pair(place, row, self.schema)


def pair(place: str, row: dict, schema: PairSchema) -> Pair:
    """Read and check one row.

    Args:
        place: location of the row, for messages.
        row: the row.
        schema: columns of the pair.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    columns = {"prompt_column": schema.prompt, "chosen_column": schema.chosen, "rejected_column": schema.rejected}
    missing = {key: name for key, name in columns.items() if name is not None and name not in row}
    if missing:
        unpaired = {"chosen_column", "rejected_column"} <= missing.keys() and {"completion", "label"} <= row.keys()
        raise no_column(place, row, " and ".join(map(repr, missing.values())), *([_UNPAIRED] if unpaired else []))
    tools = tools_of(place, row.get("tools"))
    both = (schema.chosen, schema.rejected)
    answers = [turns(place, column, row[column], "assistant", schema.chat) for column in both]
    if answers[0] == answers[1]:
        raise DataError(
            f"{place}: {schema.chosen!r} and {schema.rejected!r} are the same ({shown(answers[0][-1]['content'])}), so "
            "neither is the better one; correct or remove the row"
        )
    prompt_column = schema.prompt or ("prompt" if "prompt" in row else None)
    if prompt_column is not None:
        prompt = turns(place, prompt_column, row[prompt_column], "user", schema.chat)
        # Some data sets repeat the prompt in front of both answers.
        if all(answer[: len(prompt)] == prompt for answer in answers):
            answers = [answer[len(prompt) :] for answer in answers]
    else:
        prompt, *answers = (_split_messages if schema.chat else _split_texts)(place, row, schema, *answers)
    for column, answer in zip(both, answers, strict=True):
        _check_answer(place, column, answer)
    prompt = with_system(place, row, prompt) if schema.chat else prompt
    return Pair(*(Conversation(place, (*prompt, *answer), len(prompt), tools) for answer in answers))


def _split_messages(place: str, row: dict, schema: PairSchema, chosen: Turns, rejected: Turns) -> tuple[Turns, ...]:
    """Return (prompt, chosen, rejected). The prompt is the longest common prefix of messages."""
    if any(isinstance(row[column], str) for column in (schema.chosen, schema.rejected)):
        raise DataError(
            f"{place}: {schema.chosen!r} and {schema.rejected!r} are text, but there is no column 'prompt'; set "
            "data.prompt_column, write messages, or set data.chat=false to take the common beginning as the prompt"
        )
    length = _common(chosen, rejected)
    if not length:
        raise DataError(_NOTHING_SHARED.format(place=place, schema=schema, what="message"))
    return chosen[:length], chosen[length:], rejected[length:]


def _split_texts(place: str, row: dict, schema: PairSchema, chosen: Turns, rejected: Turns) -> tuple[Turns, ...]:
    """Return (prompt, chosen, rejected). The prompt is the longest common prefix of characters."""
    one, other = chosen[0]["content"], rejected[0]["content"]
    length = _common(one, other)
    # A space before the first different character belongs to the answers, as tokenizers join it to the word.
    if length and one[length - 1] == " ":
        length -= 1
    if not length:
        raise DataError(_NOTHING_SHARED.format(place=place, schema=schema, what="character"))
    prompt: Turns = ({"role": "user", "content": one[:length]},)
    return prompt, *(({"role": "assistant", "content": text[length:]},) for text in (one, other))


_UNPAIRED = (
    "unpaired rows (completion and label, as for TRL's KTO) are not supported: write the better and the worse answer "
    "of each prompt as chosen and rejected, also for dpo.loss=kto"
)
_NOTHING_SHARED = (
    "{place}: {schema.chosen!r} and {schema.rejected!r} do not begin with the same {what}, so they have no common "
    "prompt; correct or remove the row, or set data.prompt_column"
)


def _common(one: Any, other: Any) -> int:
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def _check_answer(place: str, column: str, answer: Turns) -> None:
    if not answer or not any(message["content"].strip() or message.get("tool_calls") for message in answer):
        raise DataError(f"{place}: {column!r} has no answer after the prompt; add it or remove the row")
    if any(message.get("weight") == 0 for message in answer):
        raise DataError(
            f"{place}: {column!r} has a turn of weight 0, but pairs are compared by their whole answers; remove the "
            "weight or the row"
        )
    if answer[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in answer)
        raise DataError(
            f"{place}: {column!r} has no assistant turn right after the prompt (roles there: {roles}); correct or "
            "remove the row"
        )


class PairEncoder(Encoder):
    """Encodes a pair as one document: the chosen conversation (segment 0), then the rejected one (segment 1).

    Both conversations are encoded as for sft. As one document, both answers are on the same side of the held-out split.
    With train_on="completion" (see ChatEncoder) both completions begin at the same token, as in TRL, also if only one
    of them shares its first token with the prompt. The other value of train_on is "assistant".
    """

    masked = segmented = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        schema: PairSchema,
        train_on: str = "assistant",
        date: str | None = None,
    ):
        super().__init__(tokenizer)
        self._one = encoder(tokenizer, ChatSchema(chat=schema.chat, train_on=train_on), date)
        self._completions = train_on == "completion"
        self.identity = digest(_VERSION, self._one.identity)
        self.counts, self.renders = self._one.counts, self._one.renders

    def reads(self, key: str) -> bool:
        return self._one.reads(key)

    def encode(self, documents: list[Pair]) -> list[Encoded]:
        encoded = self._one.encode([answer for pair in documents for answer in (pair.chosen, pair.rejected)])
        pairs = zip(encoded[::2], encoded[1::2], strict=True)
        return [_joined(*(_aligned(*both) if self._completions else both)) for both in pairs]


def _aligned(chosen: Encoded, rejected: Encoded) -> tuple[Encoded, ...]:
    """Mark both answers as trained from the earlier of their first trained tokens to their ends."""
    assert chosen.trained is not None and rejected.trained is not None  # both encoders of chats are masked
    start = min(int(np.argmax(trained)) for trained in (chosen.trained, rejected.trained))
    return tuple(Encoded(answer.tokens, np.arange(len(answer.tokens)) >= start) for answer in (chosen, rejected))


def _joined(chosen: Encoded, rejected: Encoded) -> Encoded:
    assert chosen.trained is not None and rejected.trained is not None  # both encoders of chats are masked
    segments = [0] * len(chosen.tokens) + [1] * len(rejected.tokens)
    return Encoded([*chosen.tokens, *rejected.tokens], [*chosen.trained, *rejected.trained], segments)
