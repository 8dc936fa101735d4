"""Conversations in tables: TRL's schema (`messages`, or `prompt` and `completion`), ShareGPT's, or named columns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from samecurve.data import sources
from samecurve.data.formats import no_column
from samecurve.data.schemas.messages import check_text, messages_of, shown
from samecurve.errors import DataError

if TYPE_CHECKING:
    from samecurve.config.schema import Data

_SET_COLUMNS = "set data.messages_column, or data.prompt_column and data.completion_column"
_MESSAGES = ("messages", "conversations")


@dataclass(frozen=True)
class ChatSchema:
    """Columns of a conversation.

    If all columns are None, a row's `messages` or `conversations` is read if present, else `prompt` and `completion`.

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

    schema: ChatSchema = ChatSchema()

    @property
    def identity(self) -> str:
        return json.dumps(asdict(self.schema), sort_keys=True)

    def texts(self, document: Conversation) -> list[str]:
        return [message["content"] for message in document.messages if message.get("content")]

    def read(self, place: str, row: dict) -> Conversation:
        return conversation(place, row, self.schema)


def conversation(place: str, row: dict, schema: ChatSchema) -> Conversation:
    """Read and check one row.

    Args:
        place: location of the row, for messages.
        row: the row.
        schema: columns of the conversation.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    tools = tools_of(place, row.get("tools"))
    column = schema.messages or next((name for name in _MESSAGES if name in row), _MESSAGES[0])
    if schema.prompt is None and schema.completion is None and (schema.messages or column in row):
        if not schema.chat:
            raise DataError(f"{place}: {column!r} holds messages, which need a chat template; set data.chat=true")
        if column not in row:
            raise no_column(place, row, {"messages_column": column}, fix=_SET_COLUMNS)
        if schema.train_on == "completion":
            raise DataError(
                f"{place}: {column!r} is a whole conversation, but data.train_on=completion needs to know where the "
                "prompt ends; set data.train_on=assistant, or give prompt and completion as two columns"
            )
        messages = messages_of(place, column, row[column])
        _check_trained(place, column, messages, schema)
        return Conversation(place, messages, tools=tools)
    asked, answered = schema.prompt or "prompt", schema.completion or "completion"
    if asked not in row or answered not in row:
        raise _no_column(place, row, {"prompt_column": asked, "completion_column": answered})
    prompt = turns(place, asked, row[asked], "user", schema.chat)
    completion = turns(place, answered, row[answered], "assistant", schema.chat)
    if schema.train_on == "all":
        _check_trained(place, answered, (*prompt, *completion), schema)
    else:
        _check_prompt(place, asked, prompt)
        _check_trained(place, answered, completion, schema)
    return Conversation(place, (*prompt, *completion), len(prompt), tools)


def turns(place: str, column: str, value: Any, role: str, chat: bool) -> tuple[dict[str, Any], ...]:
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


def _check_prompt(place: str, column: str, messages: tuple[dict[str, Any], ...]) -> None:
    if any(message.get("weight") == 1 for message in messages):
        raise DataError(
            f"{place}: {column!r} has a turn of weight 1, but a prompt is not trained; remove the weight, or put "
            "all turns into one column of messages"
        )


def _check_trained(place: str, column: str, messages: tuple[dict[str, Any], ...], schema: ChatSchema) -> None:
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


def _no_column(place: str, row: dict, names: dict[str, str]) -> DataError:
    """Return the error for missing columns. `names` maps "prompt_column" and "completion_column" to columns."""
    missing = {key: name for key, name in names.items() if name not in row}
    either = len(missing) == 2 and list(names.values()) == ["prompt", "completion"]
    if "completion_column" in missing:
        return no_column(
            place,
            row,
            {**missing, "messages_column": "messages"},
            "'messages', nor 'prompt' and 'completion'" if either else " and ".join(map(repr, missing.values())),
            _SET_COLUMNS,
        )
    return no_column(place, row, missing, fix=_SET_COLUMNS)
