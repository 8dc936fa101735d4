"""Write the list of a recipe's keys from the schema, as a page and as YAML.

    python -m scripts.pages.recipe_reference > docs/recipe_reference.md
    python -m scripts.pages.recipe_reference --yaml > recipes/base.yaml

The meaning of a key is the text below it in the schema. It is read from the source here, because pydantic's own
`use_attribute_docstrings` takes a tenth of a second at each start of a run, which has no use for these texts.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from samecurve.config.schema import Recipe
from samecurve.config.section import Section

_HEADER = """\
# Recipe reference

<!-- Written by `python -m scripts.pages.recipe_reference` from samecurve/config/schema*.py. Do not edit. -->

A recipe is a YAML file that gives the keys whose defaults it changes, and may name another recipe with `base:`.
[`recipes/base.yaml`](../recipes/base.yaml) is this page as YAML, to copy lines from. On the command line a key is given
as `key.path=value`; of a key that is given twice there, the last value counts and the header says so. An unknown key is
an error, and so is a key that the task, the optimizer or another option does not read.
"""
_YAML_HEADER = """\
# Every key of a recipe with its default, in comments: a recipe gives only what differs. Copy the lines that you change.
# Any key can also be given on the command line, as `key.path=value`. How the work is spread over devices is not said
# here: that is the strategy (configs/). Written by `python -m scripts.pages.recipe_reference --yaml`; do not edit.
"""
# Larger limits only keep counters from overflowing
_LARGEST_SHOWN = 10**6
# JSON schema's words for limits
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "object": "mapping"}


def render_reference() -> str:
    """The whole page, Markdown."""
    return "\n".join([_HEADER, *tables(Recipe, "")])


def meanings(section: type[Section]) -> dict[str, str]:
    """The text below each key of a section's class, in one line. A key without one is absent."""
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    text_by_key = {}
    for statements in zip(tree.body, tree.body[1:], strict=False):
        match statements:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                text_by_key[key] = " ".join(text.split())
    return text_by_key


def tables(section: type[Section], prefix: str) -> Iterator[str]:
    """A heading, the section's sentence and its table, then the same for the sections below it."""
    schema, texts, below = section.model_json_schema(), meanings(section), []
    yield f"## {prefix.removesuffix('.') or 'Top level'}\n\n{inspect.getdoc(section)}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key, field in section.model_fields.items():
        sections = _sections(field.annotation)
        if sections == [field.annotation]:  # a block itself; a list of blocks is also a key
            below.append((sections[0], f"{prefix}{key}."))
            continue
        below += [(block, f"{prefix}{key}[].") for block in sections]
        default = "*required*" if field.is_required() else f"`{json.dumps(field.default)}`"
        yield f"| `{prefix}{key}` | {_type(schema['properties'][key], sections)} | {default} | {texts[key]} |"
    yield ""
    for block, name in below:
        yield from tables(block, name)


def render_yaml() -> str:
    """The same list as YAML, all of it in comments: `##` before a meaning, `#` before a key and its default."""
    lines = "\n".join([_YAML_HEADER, *_yaml_lines(Recipe, "")])
    return re.sub(r"\n{3,}", "\n\n", lines).rstrip() + "\n"


def _yaml_lines(section: type[Section], indent: str) -> Iterator[str]:
    schema, texts = section.model_json_schema(), meanings(section)
    for key, field in section.model_fields.items():
        sections = _sections(field.annotation)
        is_block = sections == [field.annotation]
        # links lead out of docs/, where the texts are read
        meaning = (inspect.getdoc(sections[0]) or "") if is_block else texts[key]
        meaning = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", meaning)
        if is_block:
            yield ""
        yield from textwrap.wrap(meaning, 117, initial_indent=f"## {indent}", subsequent_indent=f"## {indent}")
        if is_block:
            yield f"# {indent}{key}:"
            yield from _yaml_lines(sections[0], f"{indent}  ")
            yield ""
            continue
        options = _type(schema["properties"][key], sections).replace("`", "")
        text = "" if field.is_required() else json.dumps(field.default)
        default = f" {text if chr(92) in text else text.strip(chr(34))}" if not field.is_required() else ""
        yield f"# {indent}{key}:{default}".ljust(34) + f" # {options if default else options + ', required'}"


def _sections(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation names, at any depth: of a list of them, too."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections(argument)]


def _type(schema: dict[str, Any], sections: list[type[Section]]) -> str:
    """The JSON schema of a key in words."""
    if "anyOf" in schema:
        return " or ".join(_type(variant, sections) for variant in schema["anyOf"])
    if "$ref" in schema:
        return "mapping"
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "null":
        return "null"
    if schema.get("type") == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        length = f" of {len(items)}" if "prefixItems" in schema else ""
        return f"list{length}: {_type(items[0], sections)}"
    if "type" not in schema:
        return "text or list: text"  # adapter.target_modules, whose validator says what it takes
    limits = [f"{sign} {schema[word]}" for word, sign in _LIMITS.items() if schema.get(word, 1e9) < _LARGEST_SHOWN]
    return f"{_TYPES[schema['type']]} {' and '.join(limits)}".strip()


if __name__ == "__main__":
    print(render_yaml() if sys.argv[1:] == ["--yaml"] else render_reference(), end="")
