"""Messages as rows hold them, checked, to messages as chat templates take them."""

from __future__ import annotations

import difflib
import json
from typing import Any

from samecurve.data.formats import check_characters
from samecurve.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's {"from": ..., "value": ...}; the roles above mean there what they mean here.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# What other schemas call them, for the message.
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_MAY_BE_EMPTY = ("system", "developer", "tool")


def messages_of(place: str, column: str, value: Any) -> tuple[dict[str, Any], ...]:
    """A column's list of {role, content}, or of ShareGPT's {from, value}. DataError names the message and the fix.

    weight: 0 or 1, of an assistant's, as fine-tuning files of OpenAI's have it: a turn of weight 0 is not trained.
    """
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
    if "role" not in message and {"from", "value"} <= message.keys():
        message = _from_sharegpt(message)
    if "role" not in message:
        raise DataError(f"{place}: {at} has no 'role', found: {', '.join(map(repr, message)) or 'nothing'}; add it")
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{place}: {at}.role is {shown(role)}; {_nearest_role(role)}")
    if role == "assistant" and message.get("tool_calls"):
        message.setdefault("content", "")
        message["tool_calls"] = _tool_calls(place, f"{at}.tool_calls", message["tool_calls"])
    elif "content" not in message:
        raise DataError(f"{place}: {at} has no 'content', found: {', '.join(map(repr, message))}; add it")
    if isinstance(message["content"], list):
        raise DataError(f"{place}: {at}.content is a list of parts; only text can be trained on, write one string")
    _check_weight(place, at, message)
    may_be_empty = role in _MAY_BE_EMPTY or "tool_calls" in message
    check_text(place, f"{at}.content", message["content"], "text", may_be_empty)
    return message


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    role = message.pop("from")
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": role, "content": message.pop("value"), **message}


def _tool_calls(place: str, at: str, value: Any) -> list:
    """With arguments as objects, which chat templates write as JSON; of text they would write a quoted string."""
    if not isinstance(value, list):
        raise DataError(f"{place}: {at} is {shown(value)}, not a list")
    return [_tool_call(place, f"{at}[{index}]", call) for index, call in enumerate(value)]


def _tool_call(place: str, at: str, call: Any) -> Any:
    if not isinstance(call, dict):
        raise DataError(f'{place}: {at} is {shown(call)}, not {{"name": ..., "arguments": ...}}')
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


def _check_weight(place: str, at: str, message: dict[str, Any]) -> None:
    weight = message.get("weight", 0)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{place}: {at}.weight is {shown(weight)}; it is 0 (not trained) or 1 (trained)")
    if weight and message["role"] != "assistant":
        raise DataError(
            f"{place}: {at}.weight is 1, but only assistant turns are trained, and this one's role is "
            f"{message['role']!r}; remove the weight"
        )


def check_text(place: str, at: str, value: Any, needed: str, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        raise DataError(f"{place}: {at} is {shown(value)}, not {needed}; correct or remove the row")
    if not value.strip() and not may_be_empty:
        raise DataError(f"{place}: {at} is empty; fill or remove the row")
    check_characters(place, at, value)


def _nearest_role(role: Any) -> str:
    near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
    known = _OTHER_NAMES.get(str(role).lower()) or (near[0] if near else None)
    return f"write {known!r}" if known else f"it is one of {', '.join(ROLES)}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
