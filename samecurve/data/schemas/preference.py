"""Preference pairs in tables: the formats of specs/row_formats.py, or columns that the recipe names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.data import sources
from samecurve.data.chat_encoder import encoder
from samecurve.data.encoder import Encoded, Encoder
from samecurve.data.formats import no_column
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.conversation import VERDICTS, ChatSchema, Conversation, asked, template_kwargs
from samecurve.data.schemas.messages import Turns, messages_of, shown, tools_of, turns, with_system
from samecurve.errors import DataError
from samecurve.specs.row_formats import PAIRS, SHARED, RowFormat, choice, fitting, named
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
        prompt: column of the prompt. None: the row's own columns say what is read.
        chosen: column of the better answer.
        rejected: column of the worse answer.
        chat: whether texts become turns of a chat; otherwise they are concatenated without a template.
        format: name of the format of rows.
        template_kwargs: variables of the chat template.
    """

    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    chat: bool = True
    format: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Data) -> PairSchema:
        columns = data.prompt_column, data.chosen_column, data.rejected_column
        return cls(*columns, data.chat, data.format, data.chat_template_kwargs)

    @property
    def names_columns(self) -> bool:
        """Whether the recipe names columns."""
        return self.prompt is not None or (self.chosen, self.rejected) != ("chosen", "rejected")


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
        chosen = format_of(row, self.schema)
        shared = [column for column in SHARED if self.schema.chat or column in ("tools", "functions")]
        return (*chosen.columns, *chosen.optional, *shared)

    def format_name(self, row: dict) -> str:
        return format_of(row, self.schema).name

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


def format_of(row: Iterable[str], schema: PairSchema) -> RowFormat:
    """Return the format of a row: of the columns or the format that the recipe names, else the one that fits.

    Where none fits it is that of `chosen` and `rejected`. Where several do, `pair` refuses the row.
    """
    names = set(row)
    if schema.names_columns:
        prompt = schema.prompt or ("prompt" if "prompt" in names else None)
        both = (schema.chosen, schema.rejected)
        if prompt is None:
            return RowFormat("", PAIRS, both, "whole")
        return RowFormat("", PAIRS, (prompt, *both), "answers")
    if schema.format is not None:
        return named(schema.format)
    return next(iter(fitting(names, PAIRS)), named("implicit-prompt"))


def pair(place: str, row: dict, schema: PairSchema) -> Pair:
    """Read and check one row.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    known = format_of(row, schema)
    if missing := [name for name in known.columns if name not in row]:
        fix = [_UNPAIRED] if row.keys() & set(VERDICTS) else []
        raise no_column(place, row, " and ".join(map(repr, missing)), *fix)
    if schema.format is None and known.name and len(fit := fitting(row, PAIRS)) > 1:
        raise DataError(f"{place}: {choice(fit)}")
    if not schema.chat and known.reader in ("rejected_response", "openai", "ranked"):
        raise DataError(f"{place}: {known.columns[0]!r} holds messages, which need a chat template; set data.chat=true")
    prompt, chosen, rejected, names = READERS[known.reader](place, row, known, schema)
    if chosen == rejected:
        raise DataError(
            f"{place}: {names[0]!r} and {names[1]!r} are the same ({shown(chosen[-1]['content'])}), so neither is the "
            "better one; correct or remove the row"
        )
    if prompt is None:
        split = _split_messages if schema.chat else _split_texts
        prompt, chosen, rejected = split(place, row, names, chosen, rejected)
    elif all(answer[: len(prompt)] == prompt for answer in (chosen, rejected)):
        # Some data sets repeat the prompt in front of both answers.
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    for column, answer in zip(names, (chosen, rejected), strict=True):
        _check_answer(place, column, answer)
    prompt = with_system(place, row, prompt) if schema.chat else prompt
    tools = tools_of(place, row["input"] if known.reader == "openai" else row, known.wraps_tools)
    about = len(prompt), tools, template_kwargs(place, row)
    return Pair(*(Conversation(place, (*prompt, *answer), *about) for answer in (chosen, rejected)))


# What a reader returns: prompt (None: both answers begin with it), better answer, worse answer, names of the answers
Read = tuple[Turns | None, Turns, Turns, tuple[str, str]]


def _answers(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    """Read the prompt and both answers from columns of their own."""
    column, *both = known.columns
    chosen, rejected = (turns(place, name, row[name], "assistant", schema.chat) for name in both)
    return turns(place, column, row[column], "user", schema.chat), chosen, rejected, (both[0], both[1])


def _whole(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    """Read two columns that both begin with the prompt."""
    one, other = known.columns
    if schema.chat and any(isinstance(row[column], str) for column in known.columns):
        raise DataError(
            f"{place}: {one!r} and {other!r} are text, but there is no column 'prompt'; set data.prompt_column, write "
            "messages, or set data.chat=false to take the common beginning as the prompt"
        )
    chosen, rejected = (turns(place, column, row[column], "assistant", schema.chat) for column in known.columns)
    return None, chosen, rejected, (one, other)


def _instruction(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    """Read a question as in Alpaca's format, and both answers: the last two columns."""
    column, *both = known.columns
    chosen, rejected = (turns(place, name, row[name], "assistant", schema.chat) for name in both)
    return asked(place, row, column, known.optional, schema.chat), chosen, rejected, (both[0], both[1])


def _ranked_output(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    column, output = known.columns
    if not isinstance(row[output], list) or len(row[output]) != 2:
        raise DataError(
            f"{place}: {output!r} is {shown(row[output])}, not a list of two answers, the better one first; correct "
            "or remove the row"
        )
    names = f"{output}[0]", f"{output}[1]"
    chosen, rejected = (
        turns(place, name, text, "assistant", schema.chat) for name, text in zip(names, row[output], strict=True)
    )
    return asked(place, row, column, known.optional, schema.chat), chosen, rejected, names


def _rejected_response(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    column, rejected = known.columns
    said = messages_of(place, column, row[column])
    return said[:-1], said[-1:], turns(place, rejected, row[rejected], "assistant", True), (f"{column}[-1]", rejected)


def _openai(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    column, *both = known.columns
    if not isinstance(row[column], dict) or "messages" not in row[column]:
        raise DataError(f"{place}: {column!r} is {shown(row[column])}, not an object with 'messages'; correct it")
    chosen, rejected = (messages_of(place, name, row[name]) for name in both)
    return messages_of(place, f"{column}.messages", row[column]["messages"]), chosen, rejected, (both[0], both[1])


def _ranked(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    column, answers = known.columns
    given = row[answers]
    listed = given if isinstance(given, list) else []
    ranks = [entry["rank"] for entry in listed if isinstance(entry, dict) and type(entry.get("rank")) in (int, float)]
    if len(listed) != 2 or len(ranks) != 2 or ranks[0] == ranks[1]:
        raise DataError(
            f"{place}: {answers!r} is {shown(given)}, not two objects with a different 'rank', 0 for the better one, "
            "and a 'completion'; correct or remove the row"
        )
    order = [0, 1] if ranks[0] < ranks[1] else [1, 0]
    names = [f"{answers}[{index}].completion" for index in order]
    chosen, rejected = (
        turns(place, name, given[index].get("completion"), "assistant", schema.chat)
        for name, index in zip(names, order, strict=True)
    )
    return turns(place, column, row[column], "user", schema.chat), chosen, rejected, (names[0], names[1])


READERS: dict[str, Callable[[str, dict, RowFormat, PairSchema], Read]] = {
    "answers": _answers,
    "whole": _whole,
    "instruction": _instruction,
    "ranked_output": _ranked_output,
    "rejected_response": _rejected_response,
    "openai": _openai,
    "ranked": _ranked,
}


def _split_messages(
    place: str, row: dict, names: tuple[str, str], chosen: Turns, rejected: Turns
) -> tuple[Turns, Turns, Turns]:
    """Return (prompt, chosen, rejected). The prompt is the longest common prefix of messages."""
    length = _common(chosen, rejected)
    if not length:
        raise DataError(_NOTHING_SHARED.format(place, *names, "message"))
    return chosen[:length], chosen[length:], rejected[length:]


def _split_texts(
    place: str, row: dict, names: tuple[str, str], chosen: Turns, rejected: Turns
) -> tuple[Turns, Turns, Turns]:
    """Return (prompt, chosen, rejected). The prompt is the longest common prefix of characters."""
    one, other = chosen[0]["content"], rejected[0]["content"]
    length = _common(one, other)
    # A space before the first different character belongs to the answers, as tokenizers join it to the word.
    if length and one[length - 1] == " ":
        length -= 1
    if not length:
        raise DataError(_NOTHING_SHARED.format(place, *names, "character"))
    prompt: Turns = ({"role": "user", "content": one[:length]},)
    one, other = (({"role": "assistant", "content": text[length:]},) for text in (one, other))
    return prompt, one, other


_UNPAIRED = (
    "unpaired rows (an answer and its label, as for TRL's and LLaMA-Factory's KTO) are not supported: write the better "
    "and the worse answer of each prompt as chosen and rejected, also for dpo.loss=kto, or train on the good answers "
    "alone with task=sft data.bad_rows=drop"
)
_NOTHING_SHARED = (
    "{}: {!r} and {!r} do not begin with the same {}, so they have no common prompt; correct or remove the row, or set "
    "data.prompt_column"
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
        own = ChatSchema(chat=schema.chat, train_on=train_on, template_kwargs=schema.template_kwargs)
        self._one = encoder(tokenizer, own, date, splits=False)
        self._completions = train_on == "completion"
        self.identity = digest(_VERSION, self._one.identity)
        self.counts, self.rare, self.facts = self._one.counts, self._one.rare, self._one.facts
        self.renders = self._one.renders

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
