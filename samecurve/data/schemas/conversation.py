"""Conversations in tables: the formats of specs/row_formats.py, or columns that the recipe names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from samecurve.data import sources
from samecurve.data.columns import Columns
from samecurve.data.formats import no_column
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.messages import (
    Turns,
    check_text,
    from_json,
    messages_of,
    shown,
    tools_of,
    turns,
    with_system,
)
from samecurve.data.schemas.token_rows import token_row
from samecurve.errors import DataError
from samecurve.specs.row_formats import CHAT, SHARED, TOOLS, RowFormat, choice, fitting, formats_of, named

if TYPE_CHECKING:
    from samecurve.config.schema import Data

VERDICTS = ("label", "kto_tag")  # columns of unpaired rows (KTO) that say whether the answer is good
_IS_GOOD = {"true": True, "1": True, "false": False, "0": False}  # of a csv file, too


@dataclass(frozen=True)
class ChatSchema:
    """Columns of a conversation.

    If all are None, the row's own columns say what is read.

    Attributes:
        messages: column of the messages.
        prompt: column of the prompt.
        completion: column of the completion.
        chat: whether a prompt and completion that are text become turns of a chat.
        train_on: "assistant", "completion" or "all".
        format: name of the format of rows.
        reasoning: "as_inference" or "keep", see ChatEncoder.
        template_kwargs: variables of the chat template.
        weighted: whether turns and tokens have weights other than 0 and 1.
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chat: bool = True
    train_on: str = "assistant"
    format: str | None = None
    reasoning: str = "as_inference"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False

    @classmethod
    def of(cls, data: Data) -> ChatSchema:
        columns = data.messages_column, data.prompt_column, data.completion_column
        settings = data.chat, data.train_on, data.format, data.reasoning, data.chat_template_kwargs, data.token_weights
        return cls(*columns, *settings)


@dataclass(frozen=True)
class Conversation:
    """One conversation. Its str() is its content without the place.

    Attributes:
        place: location of the row, for error messages.
        messages: messages as a chat template takes them.
        num_prompt: number of messages before the trained ones.
        tools: JSON schemas of the tools that the template offers to the model.
        template_kwargs: further variables of the template.
        tokens: token ids of a row that is tokenised already, and has no messages.
        trained: whether each of them is trained, or of `segments`.
        weights: of the loss of each of them, () for 1.
        segments: texts of a row without messages that are tokenised one by one, without a template.
    """

    place: str
    messages: Turns
    num_prompt: int = 0
    tools: Turns | None = None
    template_kwargs: dict[str, Any] | None = None
    tokens: tuple[int, ...] | None = None
    trained: tuple[bool, ...] = ()
    weights: tuple[float, ...] = ()
    segments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self._content

    # cached, because held-out hash, batch size and progress all need it
    @cached_property
    def _content(self) -> str:
        parts: tuple = (self.messages, self.num_prompt, self.tools)
        parts += (self.template_kwargs,) if self.template_kwargs else ()
        parts += (self.tokens, self.trained) if self.tokens is not None else ()
        parts += (self.weights,) if self.weights else ()
        parts += (self.segments, self.trained) if self.segments else ()
        return json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)


@dataclass(frozen=True)
class ConversationSource(sources.TableSource):
    """Tables whose rows are conversations."""

    documents_are, a_line_is = "conversations", "one conversation"
    columns_are_named_by = "data.messages_column, or data.prompt_column and data.completion_column"

    schema: ChatSchema = ChatSchema()

    @property
    def identity(self) -> str:
        # of rows with such a label, data.bad_rows=drop leaves out others
        given = [column for column in VERDICTS if column in self.selection.ignore_columns]
        return json.dumps(asdict(self.schema), sort_keys=True) + "".join(given)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        return columns_read(row, self.schema)

    def format_name(self, row: dict) -> str:
        return format_of(row, self.schema).name

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        yield from ({"messages_column": column} for column, value in row.items() if isinstance(value, list))
        wanted = self.schema.prompt or "prompt", self.schema.completion or "completion"
        yield nearest(row, dict(zip(("prompt_column", "completion_column"), wanted, strict=True)))

    def reading(self, keys: dict[str, str]) -> ConversationSource:
        changes = {key.removesuffix("_column"): column for key, column in keys.items()}
        named = {"messages": None} if "messages" not in changes else {"prompt": None, "completion": None}
        return replace(self, schema=replace(self.schema, **named, **changes))

    def _advice(self, columns: Columns) -> str:
        names = [*columns.read, *columns.unread]
        free = replace(self.schema, messages=None, prompt=None, completion=None, format=None)
        if free == self.schema or not set(columns.unread) & set(columns_read(names, free)) - set(columns.read):
            return ""
        keys = ("messages", "prompt", "completion")
        given = " and ".join(f"data.{key}_column" for key in keys if getattr(self.schema, key) is not None)
        given = given or f"data.format={self.schema.format}"
        return f"remove {given}, because the format {', '.join(format_of(names, free).columns)} is read by itself"

    def texts(self, document: Conversation) -> list[str]:
        return [*document.segments, *(message["content"] for message in document.messages if message.get("content"))]

    def read(self, place: str, row: dict) -> Conversation:
        for column in VERDICTS:
            if is_good(row.get(column)) is False and column not in (
                *self.selection.ignore_columns,
                *self.columns_read(row),
            ):
                raise DataError(
                    f"{place}: {column!r} is {row[column]!r}, so the answer is a bad one; set data.bad_rows=drop to "
                    f"train on the other rows alone, or data.ignore_columns=[{column}] to train on all"
                )
        return conversation(place, row, self.schema)


def is_good(verdict: object) -> bool | None:
    """Return what a value of the VERDICTS says of the answer; None if it says neither."""
    return _IS_GOOD.get(str(verdict).lower())


def format_of(row: Iterable[str], schema: ChatSchema) -> RowFormat:
    """Return the format of a row: of the columns or the format that the recipe names, else the one that fits.

    Where none fits it is that of `messages`. Where several do, it is the first, and `conversation` raises an error.
    """
    if schema.prompt is not None or schema.completion is not None:
        return RowFormat("", CHAT, (schema.prompt or "prompt", schema.completion or "completion"), "pair")
    if schema.messages is not None:
        return RowFormat("", CHAT, (schema.messages,), "messages", wraps_tools=schema.messages != "messages")
    if schema.format is not None:
        return named(schema.format)
    return next(iter(fitting(row, CHAT)), formats_of(CHAT)[0])


def columns_read(row: Iterable[str], schema: ChatSchema) -> tuple[str, ...]:
    """Return the columns that `conversation` reads of a row."""
    chosen = format_of(row, schema)
    shared = SHARED if schema.chat else TOOLS
    return (*chosen.columns, *chosen.optional, *(() if chosen.reader in ("tokens", "segments") else shared))


def conversation(place: str, row: dict, schema: ChatSchema) -> Conversation:
    """Read and check one row.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    chosen = format_of(row, schema)
    missing = [column for column in chosen.columns if column not in row]
    if missing:
        wanted = [missing]
        if not any((schema.messages, schema.prompt, schema.completion, schema.format)):
            wanted = [one.columns for one in formats_of(CHAT) if not one.only_named]
        raise no_column(place, row, ", nor ".join(" and ".join(map(repr, columns)) for columns in wanted))
    if schema.format is None and chosen.name and len(fit := fitting(row, CHAT)) > 1:
        raise DataError(f"{place}: {choice(fit)}")
    if chosen.reader == "tokens":
        return Conversation(place, (), **token_row(place, row, schema.train_on, schema.weighted)._asdict())
    if chosen.reader == "segments":
        return _segments(place, chosen.columns[0], row, schema)
    prompt, answer = _read(place, row, chosen, schema)
    column = chosen.columns[-1]
    if schema.train_on == "all":
        _check_trained(place, column, (*prompt, *answer), schema)
    else:
        if weight := max((message.get("weight", 0) for message in prompt), default=0):
            raise DataError(
                f"{place}: {chosen.columns[0]!r} has a turn of weight {weight:g}, but a prompt is not trained; remove "
                "the weight, or put all turns into one column of messages"
            )
        _check_trained(place, column, answer, schema)
    real = [(nth, turn["weight"]) for nth, turn in enumerate(answer) if turn.get("weight", 1) not in (0, 1)]
    if real and not schema.weighted:
        text = f"{column}[{real[0][0]}].weight is {real[0][1]:g}; write 0 (not trained) or 1 (trained), or set "
        raise DataError(f"{place}: {text}data.token_weights=true for other numbers (task sft)")
    messages = with_system(place, row, (*prompt, *answer)) if schema.chat else (*prompt, *answer)
    num_prompt = len(messages) - len(answer) if prompt else 0
    if schema.train_on == "assistant" and "history" in chosen.optional:
        num_prompt = 0  # the answers of the column `history` are trained, too
    tools = tools_of(place, row, chosen.wraps_tools)
    return Conversation(place, messages, num_prompt, tools, template_kwargs(place, row))


def _read(place: str, row: dict, chosen: RowFormat, schema: ChatSchema) -> tuple[Turns, Turns]:
    """Return (prompt, answer); of a column of messages all is the answer."""
    column, answered = chosen.columns[0], chosen.columns[-1]
    if chosen.reader == "messages":
        if not schema.chat:
            raise DataError(f"{place}: {column!r} holds messages, which need a chat template; set data.chat=true")
        if schema.train_on == "completion":
            raise DataError(
                f"{place}: {column!r} is a whole conversation, but data.train_on=completion needs to know where the "
                "prompt ends; set data.train_on=assistant, or give prompt and completion as two columns"
            )
        return (), messages_of(place, column, row[column])
    if chosen.reader == "pair":
        prompt = turns(place, column, row[column], "user", schema.chat)
        return prompt, turns(place, answered, row[answered], "assistant", schema.chat)
    # Alpaca's format: the user says the instruction, and its input on the next line
    check_text(place, answered, row[answered], "text")
    prompt = asked(place, row, column, chosen.optional, schema.chat)
    if chosen.reader in ("stanford", "axolotl"):
        said = {name: row.get(name) or "" for name in ("instruction", "input")}
        text = _STANFORD[not said["input"]].format(**said) + "\n" * (chosen.reader == "axolotl")
        prompt = ({**prompt[0], "content": text},)
    return prompt, ({"role": "assistant", "content": row[answered]},)


def asked(place: str, row: dict, column: str, optional: tuple[str, ...], chat: bool) -> Turns:
    """Return the turns of `history`, if any, and the question: the column's text, and the further one's on a new line.

    Both are those of LLaMA-Factory (src/llamafactory/data/converter.py).

    Args:
        column: column of the question.
        optional: the column of a further text, if any, and `history`: [[question, answer], ...].
        chat: whether a row may have several turns.
    """
    names = [column, *(name for name in optional if name != "history")]
    said = [(name, row[name]) for name in names if row.get(name) not in (None, "")]
    for name, value in said:
        check_text(place, name, value, "text")
    if not said:
        empty = " and ".join(map(repr, names))
        fix = "fill one of them or remove the row" if len(names) > 1 else "fill or remove the row"
        raise DataError(f"{place}: {empty} {'are' if len(names) > 1 else 'is'} empty; {fix}")
    earlier = []
    for index, exchange in enumerate((row.get("history") if "history" in optional else None) or ()):
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise DataError(
                f"{place}: history[{index}] is {shown(exchange)}, not a question and its answer; write "
                '[["question", "answer"], ...] or remove the row'
            )
        for role, text in zip(("user", "assistant"), exchange, strict=True):
            check_text(place, f"history[{index}]", text, "text")
            earlier.append({"role": role, "content": text})
    if earlier and not chat:
        raise DataError(f"{place}: 'history' has turns, which need a chat template; set data.chat=true")
    return (*earlier, {"role": "user", "content": "\n".join(value for _, value in said)})


# The two prompts of github.com/tatsu-lab/stanford_alpaca, train.py: with an input, and without.
_STANFORD = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
    "\n\n### Response:",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:",
)


def _segments(place: str, column: str, row: dict, schema: ChatSchema) -> Conversation:
    """Read a list of {"text": ..., "label": whether it is trained}, as axolotl does (input_output.py)."""
    listed = row[column] if isinstance(row[column], list) else []
    wrong = [one for one in listed if not isinstance(one, dict) or one.get("label") not in (True, False)]
    if wrong or not listed:
        raise DataError(
            f"{place}: {column!r} has {shown(wrong[0] if wrong else row[column])}, which is no segment; write "
            '[{"label": true, "text": "..."}, ...]'
        )
    for index, segment in enumerate(listed):
        check_text(place, f"{column}[{index}].text", segment.get("text"), "text", may_be_empty=True)
    trained = tuple(schema.train_on == "all" or bool(segment["label"]) for segment in listed)
    if not any(segment["text"] for segment, is_trained in zip(listed, trained, strict=True) if is_trained):
        raise DataError(f"{place}: {column!r} has no text whose label is true, so no token would be trained")
    return Conversation(place, (), trained=trained, segments=tuple(segment["text"] for segment in listed))


def template_kwargs(place: str, row: dict) -> dict[str, Any] | None:
    """Read the column `chat_template_kwargs`: variables of the template, as in TRL."""
    column = "chat_template_kwargs"
    value = from_json(place, column, row.get(column))
    if value and not isinstance(value, dict):
        raise DataError(f'{place}: {column!r} is {shown(value)}, not an object; write {{"name": value}}')
    return value or None


def _check_trained(place: str, column: str, messages: Turns, schema: ChatSchema) -> None:
    """Raise DataError if no turn is trained, or if a turn has weight 0 although `train_on` trains all turns."""
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if schema.train_on != "assistant" and any(message.get("weight") == 0 for message in messages):
        raise DataError(
            f"{place}: {column!r} has a turn of weight 0, but data.train_on={schema.train_on} trains all turns; set it "
            "to assistant, or remove the weight"
        )
    if schema.train_on != "assistant" or any(weights) or any(message.get("weight") == 1 for message in messages):
        return
    roles = ", ".join(message["role"] for message in messages)
    fix = "; remove the row, or set data.train_on=all"
    if weights:
        what, fix = "only assistant turns of weight 0", "; remove the row, or give a turn the weight 1"
    else:
        what = f"no assistant turn (roles: {roles})"
    raise DataError(f"{place}: {column!r} has {what}, so no token would be trained{fix}")
