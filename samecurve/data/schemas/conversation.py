"""Conversations in tables: TRL's, ShareGPT's and Alpaca's formats of rows, or columns that the recipe names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from samecurve.data import sources
from samecurve.data.columns import Columns
from samecurve.data.formats import no_column
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.messages import check_text, messages_of, shown
from samecurve.errors import DataError

if TYPE_CHECKING:
    from samecurve.config.schema import Data

Turns = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ChatSchema:
    """Columns of a conversation.

    If all columns are None, FORMATS says what is read.

    Attributes:
        messages: column of the messages.
        prompt: column of the prompt.
        completion: column of the completion.
        chat: whether a prompt and completion that are text become turns of a chat.
        train_on: "assistant", "completion" or "all".
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chat: bool = True
    train_on: str = "assistant"

    @classmethod
    def of(cls, data: Data) -> ChatSchema:
        return cls(data.messages_column, data.prompt_column, data.completion_column, data.chat, data.train_on)


@dataclass(frozen=True)
class Conversation:
    """One conversation. Its str() is its content without the place.

    Attributes:
        place: location of the row, for error messages.
        messages: messages as a chat template takes them.
        num_prompt: number of messages before the trained ones.
        tools: JSON schemas of the tools that the template offers to the model.
    """

    place: str
    messages: tuple[dict[str, Any], ...]
    num_prompt: int = 0
    tools: tuple[dict[str, Any], ...] | None = None

    def __str__(self) -> str:
        return self._content

    # cached, because held-out hash, batch size and progress all need it
    @cached_property
    def _content(self) -> str:
        parts = (self.messages, self.num_prompt, self.tools)
        return json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)


@dataclass(frozen=True)
class ConversationSource(sources.TableSource):
    """Tables whose rows are conversations."""

    documents_are, a_line_is = "conversations", "one conversation"
    columns_are_named_by = "data.messages_column, or data.prompt_column and data.completion_column"

    schema: ChatSchema = ChatSchema()

    @property
    def identity(self) -> str:
        return json.dumps(asdict(self.schema), sort_keys=True)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        return columns_read(row, self.schema)

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
        free = replace(self.schema, messages=None, prompt=None, completion=None)
        if free == self.schema or not set(columns.unread) & set(columns_read(names, free)) - set(columns.read):
            return ""
        keys = ("messages", "prompt", "completion")
        given = " and ".join(f"data.{key}_column" for key in keys if getattr(self.schema, key) is not None)
        return f"remove {given}, because the format {', '.join(format_of(names, free).columns)} is read by itself"

    def texts(self, document: Conversation) -> list[str]:
        return [message["content"] for message in document.messages if message.get("content")]

    def read(self, place: str, row: dict) -> Conversation:
        return conversation(place, row, self.schema)


@dataclass(frozen=True)
class RowFormat:
    """A format of rows that is recognised by its columns.

    Attributes:
        columns: columns that every row has.
        turns: (place, row, format, schema) -> (messages before the answer, messages of the answer).
        more: columns that a row may have besides.
    """

    columns: tuple[str, ...]
    turns: Callable[[str, dict, RowFormat, ChatSchema], tuple[Turns, Turns]]
    more: tuple[str, ...] = ()


def format_of(row: Iterable[str], schema: ChatSchema) -> RowFormat:
    """Return the format of a row: of the columns that the recipe names, else the first of FORMATS with its columns."""
    if schema.prompt is not None or schema.completion is not None:
        return RowFormat((schema.prompt or "prompt", schema.completion or "completion"), _pair)
    if schema.messages is not None:
        return RowFormat((schema.messages,), _messages)
    names = set(row)
    return next((known for known in FORMATS if names.issuperset(known.columns)), RowFormat(("messages",), _messages))


def columns_read(row: Iterable[str], schema: ChatSchema) -> tuple[str, ...]:
    """Return the columns that `conversation` reads of a row."""
    chosen = format_of(row, schema)
    return (*chosen.columns, *chosen.more, "tools", *(["system"] if schema.chat else []))


def conversation(place: str, row: dict, schema: ChatSchema) -> Conversation:
    """Read and check one row.

    Args:
        place: location of the row, for messages.
        row: the row.
        schema: columns of the conversation.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    tools, chosen = tools_of(place, row.get("tools")), format_of(row, schema)
    missing = [column for column in chosen.columns if column not in row]
    if missing:
        raise no_column(place, row, _wanted(chosen, missing, schema))
    prompt, answer = chosen.turns(place, row, chosen, schema)
    column = chosen.columns[-1]
    if schema.train_on == "all":
        _check_trained(place, column, (*prompt, *answer), schema)
    else:
        _check_prompt(place, chosen.columns[0], prompt)
        _check_trained(place, column, answer, schema)
    messages = with_system(place, row, (*prompt, *answer)) if schema.chat else (*prompt, *answer)
    num_prompt = len(messages) - len(answer) if prompt else 0
    if schema.train_on == "assistant" and chosen.turns is _instruction:
        num_prompt = 0  # the answers of the column `history` are trained, too
    return Conversation(place, messages, num_prompt, tools)


def _messages(place: str, row: dict, chosen: RowFormat, schema: ChatSchema) -> tuple[Turns, Turns]:
    (column,) = chosen.columns
    if not schema.chat:
        raise DataError(f"{place}: {column!r} holds messages, which need a chat template; set data.chat=true")
    if schema.train_on == "completion":
        raise DataError(
            f"{place}: {column!r} is a whole conversation, but data.train_on=completion needs to know where the "
            "prompt ends; set data.train_on=assistant, or give prompt and completion as two columns"
        )
    return (), messages_of(place, column, row[column])


def _pair(place: str, row: dict, chosen: RowFormat, schema: ChatSchema) -> tuple[Turns, Turns]:
    asked, answered = chosen.columns
    prompt = turns(place, asked, row[asked], "user", schema.chat)
    return prompt, turns(place, answered, row[answered], "assistant", schema.chat)


def _instruction(place: str, row: dict, chosen: RowFormat, schema: ChatSchema) -> tuple[Turns, Turns]:
    """Read Alpaca's format: the user says the instruction, and its input on the next line.

    The text and the turns of `history`, [[question, answer], ...], are those of LLaMA-Factory
    (src/llamafactory/data/converter.py).
    """
    (instruction, answered), (further, *history) = chosen.columns, chosen.more
    asked = [(column, row[column]) for column in (instruction, further) if row.get(column) not in (None, "")]
    for column, value in asked:
        check_text(place, column, value, "text")
    if not asked:
        raise DataError(f"{place}: {instruction!r} and {further!r} are empty; fill one of them or remove the row")
    earlier = []
    for index, exchange in enumerate((row.get(history[0]) if history else None) or ()):
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise DataError(
                f"{place}: {history[0]}[{index}] is {shown(exchange)}, not a question and its answer; write "
                '[["question", "answer"], ...] or remove the row'
            )
        for role, text in zip(("user", "assistant"), exchange, strict=True):
            check_text(place, f"{history[0]}[{index}]", text, "text")
            earlier.append({"role": role, "content": text})
    if earlier and not schema.chat:
        raise DataError(f"{place}: {history[0]!r} has turns, which need a chat template; set data.chat=true")
    question = {"role": "user", "content": "\n".join(value for _, value in asked)}
    check_text(place, answered, row[answered], "text")
    return (*earlier, question), ({"role": "assistant", "content": row[answered]},)


# A row has the first of these formats whose columns it has.
FORMATS = (
    RowFormat(("messages",), _messages),
    RowFormat(("conversations",), _messages),
    RowFormat(("prompt", "completion"), _pair),
    RowFormat(("instruction", "output"), _instruction, ("input", "history")),
    RowFormat(("instruction", "response"), _instruction, ("context",)),
)


def with_system(place: str, row: dict, messages: Turns) -> Turns:
    """Put the text of the column `system`, if the row has one, before the messages."""
    value = row.get("system")
    if value in (None, ""):
        return messages
    check_text(place, "system", value, "text")
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] == value:
            return messages
        raise DataError(
            f"{place}: the row has a column 'system' ({shown(value)}) and a message of the role "
            f"{messages[0]['role']!r} ({shown(messages[0]['content'])}); keep one of the two"
        )
    return {"role": "system", "content": value}, *messages


def turns(place: str, column: str, value: Any, role: str, chat: bool) -> Turns:
    """Read a column as messages.

    Args:
        place: file and line or row, for messages.
        column: name of the column, for messages.
        role: role of the turn that a text becomes.
        chat: also accept a list of messages.

    Raises:
        DataError: as `check_text` and `messages_of`.
    """
    if isinstance(value, list) and chat:
        return messages_of(place, column, value)
    check_text(place, column, value, "text or a list of messages" if chat else "text")
    return ({"role": role, "content": value},)


def _check_prompt(place: str, column: str, messages: Turns) -> None:
    if any(message.get("weight") == 1 for message in messages):
        raise DataError(
            f"{place}: {column!r} has a turn of weight 1, but a prompt is not trained; remove the weight, or put "
            "all turns into one column of messages"
        )


def _check_trained(place: str, column: str, messages: Turns, schema: ChatSchema) -> None:
    """Raise DataError if no turn is trained, or if a turn has weight 0 although `train_on` trains all turns."""
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if schema.train_on != "assistant" and any(message.get("weight") == 0 for message in messages):
        raise DataError(
            f"{place}: {column!r} has a turn of weight 0, but data.train_on={schema.train_on} trains all turns; set it "
            "to assistant, or remove the weight"
        )
    if schema.train_on != "assistant" or any(weights):
        return
    roles = ", ".join(message["role"] for message in messages)
    fix = "; remove the row, or set data.train_on=all"
    if weights:
        what, fix = "only assistant turns of weight 0", "; remove the row, or give a turn the weight 1"
    else:
        what = f"no assistant turn (roles: {roles})"
    raise DataError(f"{place}: {column!r} has {what}, so no token would be trained{fix}")


def tools_of(place: str, value: Any) -> tuple[dict[str, Any], ...] | None:
    """Read the column `tools`: a list of JSON schemas, or the list as JSON text, as in many Arrow files."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{place}: 'tools' is not JSON: {error}; correct or remove it") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{place}: 'tools' is {shown(value)}, not a list of JSON schemas; correct or remove it")
    return tuple(value)


def _wanted(chosen: RowFormat, missing: list[str], schema: ChatSchema) -> str:
    """Describe the missing columns: all formats where the recipe names no column."""
    if any((schema.messages, schema.prompt, schema.completion)):
        return " and ".join(map(repr, missing))
    return ", nor ".join(" and ".join(map(repr, known.columns)) for known in FORMATS)
