"""Overrides of the command line, `key.path=value`: applied to a document, or merged with those that a command adds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from samecurve.config.documents import COMMAND_LINE, ConfigProblem, Document, KeyPath, describe, parse_yaml


def apply_override(document: Document, argument: str) -> None:
    """Apply one `key.path=value` of the command line. Of a key that is given twice the last value counts, with a note.

    The value is read as YAML, and as text if it is no valid YAML: the shell removes the quotes of
    `data.pattern='**/*.md'`, and YAML would take the rest for a broken alias.
    """
    dotted, equals, text = argument.partition("=")
    path = tuple(dotted.split("."))
    if not equals or not all(path):
        text = f"found {describe(argument)}, expected key.path=value"
        document.problems.append(ConfigProblem(COMMAND_LINE, "", text))
        return
    parsed, problems = _value(text)
    if problems:
        document.problems += [ConfigProblem(COMMAND_LINE, dotted, problem) for problem in problems]
        return
    earlier = [other for other in _replaced(document, path) if other != argument]
    document.notes += [f"{argument} replaces {other} of the command line" for other in earlier]
    block = document.content
    for depth, key in enumerate(path[:-1], start=1):
        # None: the block is absent, or stands in the file without keys
        if not isinstance(block.get(key), (dict, type(None))):
            outer = ".".join(path[:depth])
            why = f"{outer} is {describe(block[key])}, which has no keys; set {outer} itself"
            document.problems.append(ConfigProblem(COMMAND_LINE, dotted, why))
            return
        block[key] = dict(block.get(key) or {})
        block = block[key]
    block[path[-1]] = parsed
    # the lines of keys inside the old value no longer apply
    document.places = {known: place for known, place in document.places.items() if known[: len(path)] != path}
    document.places[path] = COMMAND_LINE
    document.typed = {known: value for known, value in document.typed.items() if known[: len(path)] != path}
    document.typed[path] = text


def latest_overrides(overrides: Sequence[str]) -> list[str]:
    """Keep the last override of each key, for commands that add overrides of their own to the user's.

    An override replaces earlier ones of its key and of keys inside it, and its part of an earlier block around it.
    """
    latest: dict[KeyPath, str] = {}
    for argument in overrides:
        dotted, _, text = argument.partition("=")
        path = tuple(dotted.split("."))
        latest = {known: value for known, value in latest.items() if known[: len(path)] != path}
        for around in [known for known in latest if path[: len(known)] == known]:
            latest[around] = _without(latest[around], path[len(around) :])
        latest[path] = text
    return [f"{'.'.join(path)}={text}" for path, text in latest.items()]


def _value(text: str) -> tuple[Any, list[str]]:
    """Return the value that the text spells, and its problem."""
    document = Document(COMMAND_LINE.file)
    # parse_yaml would make {} of empty text, as of an empty file
    parsed = parse_yaml(text, document) if text else ""
    # What begins like a list, a block or a quoted text is meant as YAML, whose mistake is to be told.
    if document.problems and not text.startswith(("[", "{", '"', "'")):
        return text, []
    return parsed, [problem.text for problem in document.problems]


def _replaced(document: Document, path: KeyPath) -> Iterator[str]:
    """Yield the earlier arguments of the command line whose values this key replaces, wholly or in part."""
    for known, text in document.typed.items():
        inside = path[: len(known)] == known and _has(document, path, len(known))
        if inside or known[: len(path)] == path:
            yield f"{'.'.join(known)}={text}"


def _has(document: Document, path: KeyPath, depth: int) -> bool:
    """Whether the block at path[:depth] has the key, or something that is no block around it."""
    block = document.get(*path[:depth])
    for key in path[depth:]:
        if not isinstance(block, dict):
            return True
        if key not in block:
            return False
        block = block[key]
    return True


def _without(text: str, path: KeyPath) -> str:
    """The text of a block without one of its keys."""
    content, problems = _value(text)
    block = content
    for key in path[:-1]:
        block = block.get(key) if isinstance(block, dict) else None
    if problems or not isinstance(block, dict) or path[-1] not in block:
        return text
    del block[path[-1]]
    return json.dumps(content, ensure_ascii=False)  # JSON is YAML
