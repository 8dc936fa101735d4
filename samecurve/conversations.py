"""Rows to conversations: TRL's schema (`messages`, or `prompt` and `completion`), or columns that the recipe names."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import sources
from .errors import DataError
from .tables import check_characters

if TYPE_CHECKING:
    from .config import Data

ROLES = ("system", "developer", "user", "assistant", "tool")
# What other schemas call them, for the message.
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_MAY_BE_EMPTY = ("system", "developer", "tool")


@dataclass(frozen=True)
class Schema:
    """Where rows hold what. None: `messages` where a row has it, else `prompt` and `completion`.

    chat: whether prompt and completion that are text become turns. train_on: "assistant" or "all".
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chat: bool = True
    train_on: str = "assistant"

    @classmethod
    def of(cls, data: Data) -> Schema:
        return cls(data.messages_column, data.prompt_column, data.completion_column, data.chat, data.train_on)


@dataclass(frozen=True)
class Conversation:
    """messages: as a chat template takes them. num_prompt: how many of them come before what is trained.

    place: where the row is, for messages. tools: what the row offers to the model, for the template. Its str() is what
    it says, without the place.
    """

    place: str
    messages: tuple[dict[str, Any], ...]
    num_prompt: int = 0
    tools: tuple[dict[str, Any], ...] | None = None

    def __str__(self) -> str:
        return self._content

    @cached_property
    def _content(self) -> str:
        parts = (self.messages, self.num_prompt, self.tools)
        return json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)


@dataclass(frozen=True)
class ConversationSource(sources.TableSource):
    """Tables whose rows are conversations."""

    documents_are, a_line_is = "conversations", "one conversation"

    schema: Schema = Schema()

    @property
    def identity(self) -> str:
        return json.dumps(asdict(self.schema), sort_keys=True)

    def texts(self, document: Conversation) -> list[str]:
        return [message["content"] for message in document.messages if message.get("content")]

    def read(self, place: str, row: dict) -> Conversation:
        return conversation(place, row, self.schema)


def find(name: str, pattern: str | None, schema: Schema) -> sources.Source:
    """The conversations behind `data.path`. Errors: as sources.find."""
    if name == sources.FUNCTIONS:
        from .functions import FunctionSource

        return FunctionSource(name, sources.builtin_files())
    return ConversationSource(name, sources.find(name, pattern).files, schema=schema)


def conversation(place: str, row: dict, schema: Schema) -> Conversation:
    """A row, checked. DataError names the place, the column, the value and the fix."""
    tools = tools_of(place, row.get("tools"))
    column = schema.messages or "messages"
    if schema.prompt is None and schema.completion is None and (schema.messages or column in row):
        if not schema.chat:
            raise DataError(f"{place}: {column!r}: messages need a template; set data.chat=true")
        if column not in row:
            raise DataError(_no_column(place, row, {"messages": column}))
        messages = messages_of(place, column, row[column])
        _check_trained(place, column, messages, schema)
        return Conversation(place, messages, tools=tools)
    names = {"prompt": schema.prompt or "prompt", "completion": schema.completion or "completion"}
    if not row.keys() >= set(names.values()):
        raise DataError(_no_column(place, row, names))
    prompt = turns(place, names["prompt"], row[names["prompt"]], "user", schema)
    completion = turns(place, names["completion"], row[names["completion"]], "assistant", schema)
    _check_trained(place, names["completion"], completion, schema)
    return Conversation(place, (*prompt, *completion), len(prompt), tools)


def turns(place: str, column: str, value: Any, role: str, schema: Schema) -> tuple[dict[str, Any], ...]:
    """Text is one turn of the role; a list is messages."""
    if isinstance(value, list) and schema.chat:
        return messages_of(place, column, value)
    _check_text(place, column, value, "text" if not schema.chat else "text or a list of messages")
    return ({"role": role, "content": value},)


def messages_of(place: str, column: str, value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}: {column!r} is {shown(value)}, not a list of messages; "
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    return tuple(_message(place, f"{column}[{index}]", message) for index, message in enumerate(value))


def _message(place: str, at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{place}: {at} is {shown(value)}, not {{"role": ..., "content": ...}}')
    # Arrow gives every message of a file all keys that any of them has
    message = {key: part for key, part in value.items() if part is not None}
    if "role" not in message:
        found = ", ".join(map(repr, message)) or "nothing"
        fix = "; rename 'from' to 'role' and 'value' to 'content'" if {"from", "value"} <= message.keys() else ""
        raise DataError(f"{place}: {at} has no 'role', found: {found}{fix or '; add it'}")
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{place}: {at}.role is {shown(role)}; {_nearest_role(role)}")
    if role == "assistant" and message.get("tool_calls"):
        message.setdefault("content", "")
        if not isinstance(message["tool_calls"], list):
            raise DataError(f"{place}: {at}.tool_calls is {shown(message['tool_calls'])}, not a list")
    elif "content" not in message:
        raise DataError(f"{place}: {at} has no 'content', found: {', '.join(map(repr, message))}; add it")
    if isinstance(message["content"], list):
        raise DataError(f"{place}: {at}.content is a list of parts; only text can be trained on, write one string")
    may_be_empty = role in _MAY_BE_EMPTY or "tool_calls" in message
    _check_text(place, f"{at}.content", message["content"], "text", may_be_empty)
    return message


def _check_text(place: str, at: str, value: Any, needed: str, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        raise DataError(f"{place}: {at} is {shown(value)}, not {needed}; correct or remove the row")
    if not value.strip() and not may_be_empty:
        raise DataError(f"{place}: {at} is empty; fill or remove the row")
    check_characters(place, at, value)


def _check_trained(place: str, column: str, messages: tuple[dict[str, Any], ...], schema: Schema) -> None:
    if schema.train_on == "assistant" and not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{place}: {column!r} has no assistant turn (roles: {roles}), so nothing of it is trained; remove the row, "
            "or set data.train_on=all"
        )


def tools_of(place: str, value: Any) -> tuple[dict[str, Any], ...] | None:
    """The column `tools`: a list of JSON schemas, or that list as JSON text, as Arrow files often hold it."""
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


def _no_column(place: str, row: dict, names: dict[str, str]) -> str:
    """names: "messages", or "prompt" and "completion" -> the column that was looked for."""
    missing = {key: name for key, name in names.items() if name not in row}
    fixes = []
    for key, name in {**missing, **({"messages": "messages"} if "completion" in missing else {})}.items():
        nearest = difflib.get_close_matches(name, map(str, row), n=1, cutoff=0.6)
        fixes += [f"data.{key}_column={nearest[0]}"] if nearest else []
    either = len(missing) == 2 and list(names.values()) == ["prompt", "completion"]
    wanted = "'messages', nor 'prompt' and 'completion'" if either else " and ".join(map(repr, missing.values()))
    keys = "data.messages_column, or data.prompt_column and data.completion_column"
    fix = f"did you mean {' '.join(fixes)}?" if fixes else f"set {keys}"
    return f"{place}: no column {wanted}, found: {', '.join(map(str, row)) or 'nothing'}; {fix}"


def _nearest_role(role: Any) -> str:
    near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
    known = _OTHER_NAMES.get(str(role).lower()) or (near[0] if near else None)
    return f"write {known!r}" if known else f"it is one of {', '.join(ROLES)}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
