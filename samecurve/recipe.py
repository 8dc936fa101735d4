"""A recipe file and the command line's overrides -> a `Recipe`, or the list of everything that is wrong with them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError

from . import layers, rules
from .config import Recipe
from .documents import Document, KeyPath, describe, override, read, report, suggest
from .errors import ConfigurationError
from .renamed import block_as_value, called_here

_NEEDED = {
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "string_type": "text is needed",
    "string_too_short": "text that is not empty is needed",
    "bool_type": "true or false is needed",
    "dict_type": "a block of keys is needed",
    "model_type": "a block of keys is needed",
    "tuple_type": "a list is needed",
    "too_long": "{max_length} values are needed, not {actual_length}",
    "literal_error": "one of {expected} is needed",
    "greater_than": "a number above {gt} is needed",
    "greater_than_equal": "a number of at least {ge} is needed",
    "less_than": "a number below {lt} is needed",
    "less_than_equal": "a number of at most {le} is needed",
}


# in a key path: any place of a list
_ANY = "*"


class Source(NamedTuple):
    """What the user wrote. `recipe` is None when anything in it breaks the schema."""

    document: Document
    recipe: Recipe | None
    invalid: frozenset[KeyPath]

    def value(self, dotted: str) -> Any:
        """What the recipe says, or the schema's default. Raises KeyError where it is missing or has the wrong type."""
        path = tuple(dotted.split("."))
        if any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in self.invalid):
            raise KeyError(dotted)
        found, model = self.document.content, Recipe
        for key in path:
            info = model.model_fields[key]
            found = found[key] if key in found else info.get_default(call_default_factory=True)
            model = info.annotation
            found = found.model_dump() if isinstance(found, BaseModel) else found
        return found

    def cite(self, dotted: str) -> str:
        """`key is value (file:line)`, for a message about another file."""
        path = tuple(dotted.split("."))
        try:
            place = self.document.places.get(path, "the default")
            shown = "a block" if isinstance(self.value(dotted), dict) else json.dumps(self.value(dotted))
        except KeyError:
            return dotted
        return f"{dotted} is {shown} ({place})"


def load(path: str, overrides: Sequence[str] = ()) -> Source:
    """Read `path`, the files that it is based on, and `key.path=value` overrides; check schema and rules.

    The problems are in `Source.document.problems`. Whether the batch divides is known only with the world size.
    """
    document = _read_based(path, ())
    unreadable = bool(document.problems) and not document.content
    for argument in overrides:
        override(document, argument)
    layers.settle_command_line(document)
    if unreadable:
        return Source(document, None, frozenset({()}))
    recipe, invalid = _validate(document)
    source = Source(document, recipe, invalid)
    rules.apply(source)
    return source


def checked(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe. Raises ConfigurationError with everything that is wrong with it."""
    source = load(path, overrides)
    if source.document.problems:
        raise ConfigurationError(report(source.document.problems))
    return source.recipe


def validated(document: Document) -> Recipe:
    """By the schema alone: what a run has trained is not asked whether its files are still there.

    Raises ConfigurationError with everything that is wrong with it.
    """
    recipe, _ = _validate(document)
    if document.problems:
        raise ConfigurationError(report(document.problems))
    return recipe


def _read_based(path: str, chain: tuple[str, ...]) -> Document:
    """The file merged over the file that its `base` key names (relative to the file), and so on."""
    document = read(path)
    base = document.content.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        document.problem(("base",), f"found {describe(base)}, the name of a recipe file is needed")
        return document
    base_path = os.path.normpath(os.path.join(os.path.dirname(path), base))
    if base_path in (*chain, os.path.normpath(path)):
        document.problem(("base",), f'found "{base}", which is based on this file; break the circle')
        return document
    if not os.path.isfile(base_path):
        document.problem(("base",), f"no such file: {base_path}; the name is relative to {path}")
        return document
    return layers.over(_read_based(base_path, (*chain, os.path.normpath(path))), document)


def _validate(document: Document) -> tuple[Recipe | None, frozenset[KeyPath]]:
    for path in _text_fields(document):
        document.get(*path[:-1])[path[-1]] = document.typed[path]
    try:
        return Recipe.model_validate(document.content), frozenset()
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
    for detail in details:
        path = tuple(str(part) for part in detail["loc"])
        document.problem(path, _explain(detail, path))
    return None, frozenset(tuple(str(part) for part in detail["loc"]) for detail in details)


def _text_fields(document: Document) -> Iterator[KeyPath]:
    """Keys of the command line that YAML reads as something else, but the schema wants as text (`output_dir=1`)."""
    try:
        Recipe.model_validate(document.content)
    except ValidationError as error:
        for detail in error.errors():
            path = tuple(str(part) for part in detail["loc"])
            if detail["type"] == "string_type" and path in document.typed:
                yield path


def _explain(detail: dict, path: KeyPath) -> str:
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        asked = tuple(_ANY if part.isdecimal() else part for part in path)
        legal = [known for known in _schema_paths(Recipe) if (_ANY in known) == (_ANY in asked)]
        known_elsewhere = any(other[-1] == asked[-1] for other in legal)
        renamed = "" if known_elsewhere else called_here(asked[-1])
        return "unknown key" + (renamed or suggest(asked, legal))
    if kind == "missing":
        return "missing; add it"
    if kind not in _NEEDED:
        return f"found {describe(found)}: {detail['msg']}"
    limits = {key: f"{limit:g}" if isinstance(limit, float) else limit for key, limit in detail.get("ctx", {}).items()}
    needed = _NEEDED[kind].format(**limits)
    hint = _number_hint(found) if kind in ("int_type", "float_type") else ""
    if kind == "model_type":
        fields = [known[-1] for known in _schema_paths(Recipe) if known[:-1] == path]
        hint = block_as_value(".".join(path), found, fields)
    return f"found {describe(found)}, {needed}{hint}"


def _number_hint(found: Any) -> str:
    if not isinstance(found, str):
        return f"; write {int(found)}" if isinstance(found, float) and found.is_integer() else ""
    with contextlib.suppress(ValueError):
        float(found)
        return "; remove the quotes"
    return ""


def _schema_paths(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        for depth, block in _blocks(info.annotation):
            yield from _schema_paths(block, (*prefix, name, *[_ANY] * depth))


def _blocks(annotation: Any, depth: int = 0) -> Iterator[tuple[int, type[BaseModel]]]:
    """The blocks of keys that a field may hold, and in how many lists they lie."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield depth, annotation
    for inner in get_args(annotation):
        yield from _blocks(inner, depth + (get_origin(annotation) is tuple))
