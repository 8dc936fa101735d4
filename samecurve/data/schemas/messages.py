"""Checks the messages of a row and normalises them for chat templates; reads the columns `system` and `tools`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

from samecurve.data.formats import check_characters
from samecurve.errors import DataError
from samecurve.specs.row_formats import TOOLS

Turns = tuple[dict[str, Any], ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Role names of ShareGPT, Gemini and Cohere that differ from the roles above; Cohere and NeMo begin them with a capital.
_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatbot": "assistant"}
# A turn of these roles is a call, or a list of calls, as JSON text (LLaMA-Factory, ms-swift).
_CALLS = ("function_call", "tool_call")
# Roles of what a tool answers in LLaMA-Factory, ms-swift, OpenAI's older files and Llama 3.
_TOOL_ROLES = {"observation": "tool", "tool_response": "tool", "function": "tool", "ipython": "tool"}
# Role names of other schemas, for the error message.
_OTHER_NAMES = {"bot": "assistant", "prompter": "user"}
# Columns and keys that hold the system prompt: most, OpenOrca's and OpenRLHF's, Gemini's.
SYSTEM = ("system", "system_prompt", "systemInstruction")
# Names of a message's reasoning, in the order of transformers 5.23; a template gets it by the first two, as there.
REASONING = ("reasoning_content", "thinking", "reasoning")
_MAY_BE_EMPTY = ("system", "developer", "tool")
# Keys of a turn that say both sides: ms-swift's, and xtuner's, which may also have the system prompt.
_EXCHANGES = (("human", "assistant"), ("input", "output"))
_RESULT = "text (write the JSON text of an object, because each chat template renders objects in its own way)"
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def messages_of(place: str, column: str, value: Any) -> Turns:
    """Read a column's list of {role, content}, of ShareGPT's {from, value}, or of {human, assistant}.

    A list of texts is a question, its answer, and so on (LIMA, UltraChat). An assistant's message may have a `weight`
    of 0 or 1, as in OpenAI's fine-tuning files, or `train: false`, as in axolotl's, which means the weight 0. A turn of
    weight 0 is not trained; one of another role with `train: true` is. Calls that follow a text of the assistant, or
    other calls, are joined with it to one turn.

    Raises:
        DataError: with the message and the fix.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}: {column!r} is {shown(value)}, not a list of messages; "
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    if len(value) % 2 == 0 and all(isinstance(entry, str) for entry in value):
        value = [{"role": ROLES[2 + index % 2], "content": text} for index, text in enumerate(value)]
    said: list[dict[str, Any]] = []
    for index, entry in enumerate(value):
        for message, calls in _messages(place, f"{column}[{index}]", entry):
            if calls and said and said[-1]["role"] == "assistant" and "weight" not in {**said[-1], **message}:
                before = said.pop()
                texts = before["content"], message["content"]
                joined = [*before.get("tool_calls", []), *message["tool_calls"]]
                message = {**before, "content": "".join(texts), "tool_calls": joined}
            said.append(message)
    return tuple(said)


def _messages(place: str, at: str, value: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield (message, whether its role is that of calls) of an entry: one, or both sides of an exchange."""
    if not isinstance(value, dict):
        raise DataError(f'{place}: {at} is {shown(value)}, not a message; write {{"role": ..., "content": ...}}')
    # Arrow gives each message all keys that any message of the file has. Some templates write calls or reasoning in
    # place of the content wherever their key is there, also if it is empty.
    empty = {key for key in ("tool_calls", *REASONING) if value.get(key) == [] or not str(value.get(key)).strip()}
    message = {key: part for key, part in value.items() if part is not None and key not in empty}
    for asks, answers in _EXCHANGES:
        if {asks, answers} <= message.keys() <= {asks, answers, "system"}:
            roles = {"system": message.get("system"), "user": message[asks], "assistant": message[answers]}
            for role, content in roles.items():
                if role != "system" or content:
                    yield _message(place, at, {"role": role, "content": content}), False
            return
    for old, new in (("from", "role"), ("value", "content"), ("parts", "content")):
        if old in message and new not in message:
            message[new] = message.pop(old)
    results = _results_of(message)
    for result in results:
        yield _message(place, at, result), False
    if not results or message["content"]:
        yield _message(place, at, message), message.get("role") in _CALLS


def _results_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Take what tools answered out of the parts of a user's message, as Anthropic's; return it as messages."""
    if not isinstance(message.get("content"), list):
        return []
    parts = []
    for part in message["content"]:
        # Bedrock's Converse has calls and their results in another form
        if isinstance(part, dict) and isinstance(call := part.get("toolUse"), dict):
            part = {"type": "tool_use", "id": call.get("toolUseId"), **call}
        elif isinstance(part, dict) and isinstance(result := part.get("toolResult"), dict):
            said = result.get("content")
            if isinstance(said, list):
                said = [{"text": json.dumps(one["json"], ensure_ascii=False)} if "json" in one else one for one in said]
            part = {"type": "tool_result", "tool_use_id": result.get("toolUseId"), "content": said}
        parts.append(part)
    message["content"] = parts
    if message.get("role") != "user":
        return []
    results = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_result"]
    message["content"] = [part for part in parts if part not in results]
    return [
        {"role": "tool", "content": part.get("content", ""), "tool_call_id": part.get("tool_use_id")}
        for part in results
    ]


def _message(place: str, at: str, message: dict[str, Any]) -> dict[str, Any]:
    if "role" not in message:
        raise DataError(f"{place}: {at} has no 'role', found: {', '.join(map(repr, message)) or 'nothing'}; add it")
    if isinstance(message.get("content"), list):
        message = _without_parts(place, f"{at}.content", message)
    role = message["role"]
    if isinstance(role, str):  # only text is sure to be hashable
        role = message["role"] = _NAMES.get(role.lower(), role.lower() if role.lower() in ROLES else role)
    if role in _CALLS and isinstance(message.get("content"), str):
        message = {**message, **_calls_of(place, f"{at}.content", message["content"]), "role": "assistant"}
    elif isinstance(role, str) and role in _TOOL_ROLES:
        message = {**message, "role": _TOOL_ROLES[role]}
    elif role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
        known = _OTHER_NAMES.get(str(role).lower()) or (near[0] if near else None)
        fix = f"write {known!r}" if known else f"write one of {', '.join(ROLES)}"
        raise DataError(f"{place}: {at}.role is {shown(role)}; {fix}")
    role = message["role"]
    if isinstance(message.get("function_call"), dict):  # of OpenAI's older files
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if role == "assistant" and message.get("tool_calls"):
        # templates read the content of each message, and OpenAI's tool calls have null there
        message.setdefault("content", "")
        message["tool_calls"] = _tool_calls(place, f"{at}.tool_calls", message["tool_calls"])
    elif "content" not in message:
        raise DataError(f"{place}: {at} has no 'content', found: {', '.join(map(repr, message))}; add it")
    _read_weight(place, at, message)
    may_be_empty = role in _MAY_BE_EMPTY or "tool_calls" in message
    check_text(place, f"{at}.content", message["content"], _RESULT if role == "tool" else "text", may_be_empty)
    return message


def _without_parts(place: str, at: str, message: dict[str, Any]) -> dict[str, Any]:
    """Join the text parts of a content list; LLaMA-Factory and Anthropic have parts of reasoning and of calls, too."""
    texts, calls, thoughts = [], [], []
    for index, part in enumerate(message["content"]):
        part = part if isinstance(part, dict) else {"text": part}
        kind = part.get("type", "text")  # Gemini's and Bedrock's have none
        flag = part.get("train", part.get("weight"))
        if flag is not None and bool(flag) is not (message["role"] == "assistant"):
            raise DataError(
                f"{place}: {at}[{index}] has {'train' if 'train' in part else 'weight'}: {str(flag).lower()}, but a "
                "turn is trained as a whole; write the flag at the message, or set data.bad_rows=drop to leave out all "
                "such rows"
            )
        if kind == "tool_use":
            if not isinstance(part.get("name"), str) or not isinstance(part.get("input"), dict):
                raise DataError(
                    f'{place}: {at}[{index}] is no call; write {{"type": "tool_use", "name": ..., "input": {{...}}}}'
                )
            called = {"name": part["name"], "arguments": part["input"]}
            calls.append({"id": part.get("id"), "type": "function", "function": called})
            continue
        text = part.get("thinking" if kind == "thinking" else "text", part.get("value"))
        if kind not in ("text", "reasoning", "thinking", "tool_call"):
            raise DataError(
                f"{place}: {at}[{index}] is a part of the type {shown(kind)}, but only text is trained on; remove the "
                "row, or set data.bad_rows=drop to leave out all such rows"
            )
        if not isinstance(text, str):
            raise DataError(f'{place}: {at}[{index}] has no text; write {{"type": "text", "text": "..."}}')
        if kind == "tool_call":
            calls += _calls_of(place, at, text)["tool_calls"]
        else:
            (texts if kind == "text" else thoughts).append(text)
    joined = {**message, "content": "".join(texts)}
    if "".join(thoughts).strip():
        joined["reasoning_content"] = "".join(thoughts)
    if calls:
        joined["tool_calls"] = calls
    return joined


def _calls_of(place: str, at: str, text: str) -> dict[str, Any]:
    """Parse the text of a turn that calls tools: thoughts between <think> and </think> if any, then JSON.

    The rule is that of LLaMA-Factory's FunctionFormatter (src/llamafactory/data/formatter.py).
    """
    thought = _THOUGHT.match(text)
    try:
        calls = json.loads(text[thought.end() :] if thought else text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f'{place}: {at} is {shown(text)}, which is no call as JSON ({error}); write {{"name": ..., "arguments": '
            "{...}} or a list of them"
        ) from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(
            f'{place}: {at} is {shown(text)}, which is no call; write {{"name": ..., "arguments": {{...}}}}'
        )
    wrapped = [{"type": "function", "function": call} for call in calls]
    return {"content": thought[0].rstrip() if thought else "", "tool_calls": wrapped}


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
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments  # encoded twice
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: {at}.arguments is {shown(call['arguments'])}, which is not JSON ({error}); write an object such "
            'as {"city": "Paris"}, {} for none'
        ) from error
    if not isinstance(arguments, dict):
        raise DataError(f"{place}: {at}.arguments is {shown(call['arguments'])}, not an object; write {{}} for none")
    return {**call, "arguments": arguments}


SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6
A_WEIGHT = f"0 or a number from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"


def is_weight(value: Any) -> bool:
    """Whether a value is A_WEIGHT. Weights are counted in units of 2 ** -24, see Counts."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(value == 0 or SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT)


def _read_weight(place: str, at: str, message: dict[str, Any]) -> None:
    """Check the weight; `train` (axolotl), `loss`, `loss_scale` (ms-swift), `loss_weight` (LLaMA-Factory) are one."""
    weight, key = message.get("weight", 0), "weight"
    if not is_weight(weight):
        fix = "write 0 (not trained) or 1 (trained)"
        raise DataError(f"{place}: {at}.weight is {shown(weight)}; {fix}, or with data.token_weights {A_WEIGHT}")
    for name in ("train", "loss", "loss_weight", "loss_scale"):
        if (flag := message.pop(name, None)) is None:
            continue
        is_number = name in ("loss_weight", "loss_scale")
        if isinstance(flag, bool) is is_number or (
            flag not in (0, 1) and not (is_weight(flag) and name == "loss_scale")
        ):
            choice = "0 or 1" if is_number else "true or false"
            raise DataError(f"{place}: {at}.{name} is {shown(flag)}; write {choice}")
        if is_number and not flag and message["role"] != "assistant":
            continue  # LLaMA-Factory writes it for each turn
        if message.setdefault("weight", flag if is_number else int(flag)) != flag:
            text = f"{place}: {at} has {name}: {str(flag).lower()} and weight: {message['weight']}"
            raise DataError(f"{text}; keep one of the two")
        weight, key = flag, name
    if weight and message["role"] != "assistant" and key != "train":
        raise DataError(
            f"{place}: {at}.{key} is {str(weight).lower()}, but it trains assistant turns alone, and this one's role "
            f"is {message['role']!r}; remove the {key}, or write train: true to train this turn, too"
        )


def turns(place: str, column: str, value: Any, role: str, chat: bool) -> Turns:
    """Read a column as messages.

    Args:
        value: a text, a message or a list of messages.
        role: role of the turn that a text becomes.
        chat: also accept messages.

    Raises:
        DataError: as `check_text` and `messages_of`.
    """
    if isinstance(value, (list, dict)) and chat:
        return messages_of(place, column, [value] if isinstance(value, dict) else value)
    check_text(place, column, value, "text or a list of messages" if chat else "text")
    return ({"role": role, "content": value},)


def with_system(place: str, row: dict, messages: Turns) -> Turns:
    """Put the text of a column of SYSTEM, if the row has one, before the messages."""
    given = [(column, row[column]) for column in SYSTEM if row.get(column) not in (None, "", [])]
    if not given:
        return messages
    if len(given) > 1:
        raise DataError(f"{place}: the row has the columns {given[0][0]!r} and {given[1][0]!r}; keep one of the two")
    ((column, value),) = given
    value = value.get("parts") if isinstance(value, dict) else value  # Gemini's
    if isinstance(value, list):
        value = _without_parts(place, column, {"role": "system", "content": value})["content"]
    check_text(place, column, value, "text")
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] == value:
            return messages
        raise DataError(
            f"{place}: the row has a column {column!r} ({shown(value)}) and a message of the role "
            f"{messages[0]['role']!r} ({shown(messages[0]['content'])}); keep one of the two"
        )
    return {"role": "system", "content": value}, *messages


def tools_of(place: str, row: dict, wraps: bool) -> Turns | None:
    """Read the columns of TOOLS: lists of JSON schemas, or JSON text of them, as in many Arrow files.

    Args:
        wraps: whether bare functions in `tools` are wrapped, see `RowFormat`; those in `functions` always are.
    """
    for column in TOOLS:
        if not (value := from_json(place, column, row.get(column))):
            continue
        wrapped = wraps or column == "functions"
        value = value.get("tools") if column == "toolConfig" and isinstance(value, dict) else value
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise DataError(f"{place}: {column!r} is {shown(value)}, not a list of JSON schemas; correct or remove it")
        tools = []
        for tool in value:
            # Bedrock's form becomes Anthropic's, and that OpenAI's, for which chat templates are written
            if isinstance(spec := tool.get("toolSpec"), dict) and isinstance(schema := spec.get("inputSchema"), dict):
                tool = {**spec, "input_schema": schema.get("json")}
                del tool["inputSchema"]
            if "input_schema" in tool:
                function = {key: part for key, part in tool.items() if key not in ("input_schema", "type")}
                tool = {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
            elif wrapped and tool.get("type") != "function":
                tool = {"type": "function", "function": tool}
            tools.append(tool)
        return tuple(tools)
    return None


def from_json(place: str, column: str, value: Any) -> Any:
    """Return a column's value, parsed if it is JSON text, as in many Arrow files; None for blank text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise DataError(f"{place}: {column!r} is not JSON: {error}; correct or remove it") from error


def check_text(place: str, at: str, value: Any, needed: str, may_be_empty: bool = False) -> None:
    """Raise DataError unless a value is text, not blank (or `may_be_empty`) and without lone surrogates.

    Args:
        at: name of the value in messages.
        needed: what the value should be, in the message for other types.
        may_be_empty: accept text without a visible character.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: {at} is {shown(value)}, not {needed}; correct or remove the row")
    if not value.strip() and not may_be_empty:
        raise DataError(f"{place}: {at} is empty; fill or remove the row")
    check_characters(place, at, value)


def shown(value: Any) -> str:
    """Format a value for a message, shortened to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
