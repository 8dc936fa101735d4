"""Checks the messages of a row and normalises them for chat templates."""

from __future__ import annotations

import difflib
import json
from typing import Any

from samecurve.data.formats import check_characters
from samecurve.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Role names of ShareGPT's {"from": ..., "value": ...} that differ from the roles above.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Role names of other schemas, for the error message.
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_MAY_BE_EMPTY = ("system", "developer", "tool")


def messages_of(place: str, column: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Read a column's list of {role, content}, or of ShareGPT's {from, value}.

    An assistant's message may have a `weight` of 0 or 1, as in OpenAI's fine-tuning files, or `train: false`, as in
    axolotl's, which means the weight 0. A turn of weight 0 is not trained.

    Args:
        place: location of the row, for messages.
        column: name of the column, for messages.
        value: content of the column.

    Raises:
        DataError: with the message and the fix.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}: {column!r} is {shown(value)}, not a list of messages; "
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    return tuple(_message(place, f"{column}[{index}]", message) for index, message in enumerate(value))


def _message(place: str, at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{place}: {at} is {shown(value)}, not a message; write {{"role": ..., "content": ...}}')
    # Arrow gives each message all keys that any message of the file has.
    message = {key: part for key, part in value.items() if part is not None}
    if "role" not in message and {"from", "value"} <= message.keys():
        sender = message.pop("from")
        # only text is sure to be hashable; the check of the role reports anything else
        named = _SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
        message = {"role": named, "content": message.pop("value"), **message}
    if "role" not in message:
        raise DataError(f"{place}: {at} has no 'role', found: {', '.join(map(repr, message)) or 'nothing'}; add it")
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{place}: {at}.role is {shown(role)}; {_nearest_role(role)}")
    if role == "assistant" and message.get("tool_calls"):
        # templates read the content of each message, and OpenAI's tool calls have null there
        message.setdefault("content", "")
        message["tool_calls"] = _tool_calls(place, f"{at}.tool_calls", message["tool_calls"])
    elif "content" not in message:
        raise DataError(f"{place}: {at} has no 'content', found: {', '.join(map(repr, message))}; add it")
    if isinstance(message["content"], list):
        raise DataError(f"{place}: {at}.content is a list of parts, but only text is supported; write one string")
    _read_weight(place, at, message)
    may_be_empty = role in _MAY_BE_EMPTY or "tool_calls" in message
    check_text(place, f"{at}.content", message["content"], "text", may_be_empty)
    return message


def _tool_calls(place: str, at: str, value: Any) -> list:
    """Check tool calls, and parse arguments that are JSON text."""
    # Chat templates write arguments as JSON: an object as it should be, but text as a quoted string.
    if not isinstance(value, list):
        raise DataError(f'{place}: {at} is {shown(value)}, not a list; write [{{"name": ..., "arguments": ...}}]')
    return [_tool_call(place, f"{at}[{index}]", call) for index, call in enumerate(value)]


def _tool_call(place: str, at: str, call: Any) -> Any:
    if not isinstance(call, dict):
        raise DataError(f'{place}: {at} is {shown(call)}, not a call; write {{"name": ..., "arguments": ...}}')
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(place, f"{at}.function", call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: {at}.arguments is {shown(call['arguments'])}, which is not JSON ({error}); write an object such "
            'as {"city": "Paris"}, {} for none'
        ) from error
    if not isinstance(arguments, dict):
        raise DataError(f"{place}: {at}.arguments is {shown(call['arguments'])}, not an object; write {{}} for none")
    return {**call, "arguments": arguments}


def _read_weight(place: str, at: str, message: dict[str, Any]) -> None:
    """Check the weight; `train` (axolotl) and `loss` (ms-swift) become one."""
    weight, key = message.get("weight", 0), "weight"
    if isinstance(weight, bool) or weight not in (0, 1):  # True == 1
        raise DataError(f"{place}: {at}.weight is {shown(weight)}; write 0 (not trained) or 1 (trained)")
    for name in ("train", "loss"):
        if (flag := message.pop(name, None)) is None:
            continue
        if not isinstance(flag, bool):
            raise DataError(f"{place}: {at}.{name} is {shown(flag)}; write true or false")
        if message.setdefault("weight", int(flag)) != flag:
            text = f"{place}: {at} has {name}: {str(flag).lower()} and weight: {message['weight']}"
            raise DataError(f"{text}; keep one of the two")
        weight, key = int(flag), name
    if weight and message["role"] != "assistant":
        raise DataError(
            f"{place}: {at}.{key} is {message['weight'] if key == 'weight' else 'true'}, but only assistant turns are "
            f"trained, and this one's role is {message['role']!r}; remove the {key}"
        )


def check_text(place: str, at: str, value: Any, needed: str, may_be_empty: bool = False) -> None:
    """Raise DataError unless a value is text, not blank (or `may_be_empty`) and without lone surrogates.

    Args:
        place: file and line or row, for messages.
        at: name of the value in messages.
        needed: what the value should be, in the message for other types.
        may_be_empty: accept text without a visible character.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: {at} is {shown(value)}, not {needed}; correct or remove the row")
    if not value.strip() and not may_be_empty:
        raise DataError(f"{place}: {at} is empty; fill or remove the row")
    check_characters(place, at, value)


def _nearest_role(role: Any) -> str:
    near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
    known = _OTHER_NAMES.get(str(role).lower()) or (near[0] if near else None)
    return f"write {known!r}" if known else f"write one of {', '.join(ROLES)}"


def shown(value: Any) -> str:
    """Format a value for a message, shortened to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
