"""A recipe as the user wrote it, with the schema's defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from samecurve.config.documents import Document, KeyPath
from samecurve.config.schema import Recipe

# In a key path: any index of a list.
ANY_ITEM = "*"


class InvalidValue(Exception):
    """The user's value of a key is invalid or unknown; rules that read the key are skipped. Not a KeyError: that is a
    key that the schema lacks, which is a mistake in the rule."""


class RecipeSource(NamedTuple):
    """A recipe as the user wrote it. `recipe` is None when anything in it breaks the schema."""

    document: Document
    recipe: Recipe | None
    invalid: frozenset[KeyPath]

    def value(self, dotted: str) -> Any:
        """Return a key's value or its default; a number is a place in a list: `data.mixture.0.path`.

        Raises:
            InvalidValue: missing, of the wrong type, or maybe in a file that could not be read.
            KeyError: no such key in the schema.
        """
        path = tuple(dotted.split("."))
        if any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in self.invalid):
            raise InvalidValue(dotted)
        node: Any = self.document.get()
        model: type[BaseModel] | None = Recipe
        for key in path:
            if isinstance(node, (list, tuple)):
                node = node[int(key)]
                continue
            assert model is not None, dotted  # no rule asks for a key below one that is not a block
            info = model.model_fields[key]
            if key not in node and self.document.incomplete:
                raise InvalidValue(dotted)
            node = node[key] if key in node else info.get_default(call_default_factory=True)
            model = next((block for _, block in _blocks_of(model, key)), None)
            # a default block is a model, one from a file a dict
            node = node.model_dump() if isinstance(node, BaseModel) else node
        return node

    def length(self, dotted: str) -> int:
        """Return the length of a list as it is written, whatever its items are; 0 if there is no list."""
        items = self.document.get(*dotted.split("."))
        return len(items) if isinstance(items, list) else 0

    def cite(self, dotted: str) -> str:
        """`key is value (file:line)`, for a message about another file."""
        path = tuple(dotted.split("."))
        try:
            place = self.document.places.get(path, "the default")
            shown = "a block" if isinstance(self.value(dotted), dict) else json.dumps(self.value(dotted))
        except InvalidValue:
            return dotted
        return f"{dotted} is {shown} ({place})"


def schema_paths(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key of a block and of the blocks in it; ANY_ITEM stands for the index of a list."""
    for name in model.model_fields:
        yield (*prefix, name)
        for depth, block in _blocks_of(model, name):
            yield from schema_paths(block, (*prefix, name, *[ANY_ITEM] * depth))


@cache  # a search asks a thousand times
def _blocks_of(model: type[BaseModel], name: str) -> tuple[tuple[int, type[BaseModel]], ...]:
    return tuple(_blocks(model.model_fields[name].annotation))


def _blocks(annotation: Any, depth: int = 0) -> Iterator[tuple[int, type[BaseModel]]]:
    """The blocks of keys that a field may hold, and in how many lists they lie."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield depth, annotation
    # lists are tuples in the schema
    for inner in get_args(annotation):
        yield from _blocks(inner, depth + (get_origin(annotation) is tuple))
