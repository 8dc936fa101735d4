"""Reads a recipe file and the command line's overrides into a `Recipe`, or reports every problem in them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from samecurve.config import inheritance, own_code, rules
from samecurve.config.adapter_folder import settle_adapter
from samecurve.config.documents import Document, KeyPath, describe, format_problems, read_document, suggest
from samecurve.config.inheritance import apply_override
from samecurve.config.key_hints import block_as_value, called_here
from samecurve.config.paths import expand_home, path_problem, read_config_file, split_output_url, split_row_counts
from samecurve.config.schema import Recipe
from samecurve.config.schema_training import AUTO
from samecurve.config.source import ANY_ITEM, InvalidValue, RecipeSource, schema_paths
from samecurve.errors import ConfigurationError
from samecurve.specs.environment import SHIPPED, shipped_file

# by pydantic's type of error; other types show pydantic's own message
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "tuple_type": "a list",
    "too_short": "at least {min_length} value{s}, not {actual_length}",
    "too_long": "{max_length} values, not {actual_length}",
    "literal_error": "one of {expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
}


def read_recipe(
    path: str, overrides: Sequence[str] = (), fill: Callable[[Document], object] | None = None
) -> RecipeSource:
    """Read a recipe, its base files and `key.path=value` overrides; check the schema and the rules.

    `fill` may write values into the document before it is checked. The problems are in
    `RecipeSource.document.problems`. Rules that depend on the strategy or the number of processes are checked later
    (strategy/validate.py).
    """
    located = shipped_file(path)
    document = _read_based(located, ())
    if located != path:
        document.notes.append(f"{path}: not in the working directory; the installed {located} is used")
    read_config_file(document)  # before its keys are overridden
    for argument in overrides:
        apply_override(document, argument)
    settle_adapter(document)
    inheritance.settle_command_line(document)
    expand_home(document)
    split_output_url(document)
    split_row_counts(document)
    read_config_file(document)
    if fill is not None:
        fill(document)
    recipe, invalid = _validate(document)
    source = RecipeSource(document, recipe, invalid)
    own_code.allow_recipe(document)
    rules.apply_rules(source)
    return source


def load_recipe(path: str, overrides: Sequence[str] = (), auto: bool = False, schedule: bool = True) -> Recipe:
    """Read a recipe.

    Args:
        auto: accept `batch.micro_batch_size: auto`, for a caller that does not need the number.
        schedule: check the rules of the block `schedule`; False for a caller that runs no step.

    Raises:
        ConfigurationError: with every problem found.
    """
    source = read_recipe(path, overrides)
    if not auto:
        refuse_auto(source)
    problems = source.document.problems
    if not schedule and source.recipe is not None:
        problems = [problem for problem in problems if not problem.key.startswith("schedule.")]
    if source.recipe is None or problems:
        raise ConfigurationError(format_problems(problems))
    return source.recipe


def refuse_auto(source: RecipeSource) -> None:
    """Add a problem for `batch.micro_batch_size: auto`, which only a start of train.py replaces by a number."""
    with contextlib.suppress(InvalidValue):
        if source.value("batch.micro_batch_size") == AUTO:
            text = "found auto, but only train.py and rehearse look for the number; give one, as they print it"
            source.document.problem(("batch", "micro_batch_size"), text)


# paths that exist and stand for data that are not here; none is within the other, or within data of a user's
STAND_INS = {"data.path": os.path.dirname(json.__file__), "evaluate.path": os.__file__}


def data_elsewhere(source: RecipeSource) -> set[str]:
    """Return the keys of data that are not here: they may lie on the machines that are meant."""
    if source.recipe is None:
        return set()
    paths = {"data.path": source.recipe.data.path, "evaluate.path": source.recipe.evaluate.path}
    keys = {problem.key for problem in source.document.problems} & paths.keys()
    return {key for key in keys if path_problem(paths[key] or "")}


def validate_recipe(document: Document) -> Recipe:
    """Check a document by the schema alone. A finished run's recipe stays valid when its files are gone.

    Raises:
        ConfigurationError: with every problem found.
    """
    recipe, _ = _validate(document)
    if recipe is None or document.problems:
        raise ConfigurationError(format_problems(document.problems))
    return recipe


def _read_based(path: str, chain: tuple[str, ...]) -> Document:
    """Read the file merged over the file that its `base` key names (relative to the file), recursively."""
    document = read_document(path)
    base = document.content.pop("base", None)  # no key of the schema, which would refuse it
    if base is None:
        return document
    if not isinstance(base, str):
        document.unreadable(("base",), f"found {describe(base)}, expected the path of a recipe file")
        return document
    base_path = os.path.normpath(os.path.join(os.path.dirname(path), base))
    if not os.path.lexists(base_path) and base.startswith(SHIPPED):
        base_path = shipped_file(base)  # recipes/lora.yaml, from any folder
    if base_path in (*chain, os.path.normpath(path)):
        document.unreadable(("base",), f'found "{base}", which is based on this file itself; remove one base key')
        return document
    # read_document would report the missing file, but not the line that names it
    if not os.path.isfile(base_path):
        document.unreadable(("base",), f"no such file: {base_path}; give a path relative to {path}")
        return document
    return inheritance.merge_over_base(_read_based(base_path, (*chain, os.path.normpath(path))), document)


def _validate(document: Document) -> tuple[Recipe | None, frozenset[KeyPath]]:
    while True:
        try:
            return Recipe.model_validate(document.content), frozenset()
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=True)
        paths = [tuple(str(part) for part in detail["loc"]) for detail in details]
        # YAML reads these values of the command line as another type although the schema wants text (output_dir=1)
        kinds = zip(paths, (detail["type"] for detail in details), strict=True)
        texts = [path for path, kind in kinds if kind == "string_type" and path in document.typed]
        if not texts:
            break
        for path in texts:
            document.get(*path[:-1])[path[-1]] = document.typed[path]
    for path, detail in zip(paths, details, strict=True):
        # A missing key may stand in a file that could not be read, but not an item's: base files add nothing to lists.
        if detail["type"] != "missing" or not document.incomplete or any(part.isdecimal() for part in path):
            document.problem(path, explain(detail, path))
    return None, frozenset(paths)


def explain(detail: ErrorDetails, path: KeyPath, schema: type[BaseModel] = Recipe) -> str:
    """Say what is wrong with the value at a path of a file that a schema refuses, and what is legal there."""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        asked = tuple(ANY_ITEM if part.isdecimal() else part for part in path)
        # The keys of a list's items are no advice for a key elsewhere, and the reverse.
        legal = [known for known in schema_paths(schema) if (ANY_ITEM in known) == (ANY_ITEM in asked)]
        known_elsewhere = any(other[-1] == asked[-1] for other in legal)
        renamed = "" if known_elsewhere else called_here(asked[-1])
        return "unknown key" + (renamed or suggest(asked, legal))
    if kind == "credentials":  # the value is a secret
        return detail["msg"]
    if kind == "missing":
        return "missing; add it"
    if kind == "value_error":
        return f"found {describe(given)}, {context['error']}"
    if kind not in _EXPECTED:
        return f"found {describe(given)}: {detail['msg']}"
    limits = {key: f"{limit:g}" if isinstance(limit, float) else limit for key, limit in context.items()}
    expected = _EXPECTED[kind].format(**limits, s="" if limits.get("min_length") == 1 else "s")
    hint = ""
    if kind in ("int_type", "float_type") and isinstance(given, str):
        with contextlib.suppress(ValueError):
            hint = "; remove the quotes" if math.isfinite(float(given)) else ""
    elif kind in ("int_type", "float_type") and isinstance(given, float) and given.is_integer():
        hint = f"; write {int(given)}"
    hint += ", or an import path such as my_module:Name" if ".".join(path) in own_code.KEYS else ""
    if kind == "model_type":
        fields = [known[-1] for known in schema_paths(schema) if known[:-1] == path]
        hint = block_as_value(".".join(path), given, fields)
    return f"found {describe(given)}, expected {expected}{hint}"
