"""Brings what strategy files say about keys of the recipe together with the recipe.

Where the recipe gives no value of its own, the file's counts; also where its value was for a small model from scratch,
which `model.path` replaces. Where both give one and differ, that is a problem.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from samecurve.config.documents import ConfigProblem, Document, KeyPath, describe
from samecurve.config.inheritance import ALTERNATIVES
from samecurve.config.schema import Recipe
from samecurve.config.schema_training import num_warmup_steps
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.strategy.accelerate_keys import ACCUMULATION
from samecurve.strategy.plan import Files, Statement

_ROWS, _MICRO = "batch.global_batch_size", "batch.micro_batch_size"


def fill_recipe(recipe: Document, files: Files, data_parallel_size: int) -> dict[str, str]:
    """Write the values of the strategy's files into a recipe, where it gives none itself. Call before its rules.

    Args:
        recipe: the document, with all of its layers.
        files: the strategy's.
        data_parallel_size: number of ranks that read different rows.

    Returns:
        The place of each value that the recipe now has from a file, by its dotted key.
    """
    taken: dict[str, str] = {}
    if recipe.incomplete:  # an absent key may stand in the file that could not be read
        return taken
    # the accumulation last, because it computes from the other parts of a batch the one that is not given
    for statement in sorted(files.statements, key=lambda statement: statement.by == ACCUMULATION):
        by = statement.by
        if by != ACCUMULATION:
            if not _is_given(recipe, by) and _value(recipe, by) not in statement.values:
                _set(recipe, by, statement.values[0], statement, taken)
            continue
        rows, micro = (recipe.get(*key.split(".")) for key in (_ROWS, _MICRO))
        steps = statement.values[0]
        if not isinstance(rows, (int, type(None))) or not isinstance(micro, (int, type(None))):
            continue  # reported by the recipe's rules, or auto
        # rows of a step = micro-batch x accumulation x ranks
        if rows is None or (_is_given(recipe, _MICRO) and not _is_given(recipe, _ROWS)):
            rows = _value(recipe, _MICRO) * steps * data_parallel_size
            if rows != _value(recipe, _ROWS):
                _set(recipe, _ROWS, rows, statement, taken)
        elif not _is_given(recipe, _MICRO) and rows > 0:
            micro = math.ceil(math.ceil(rows / data_parallel_size) / steps)
            if micro != _value(recipe, _MICRO):
                _set(recipe, _MICRO, micro, statement, taken)
    return taken


def conflicts(source: RecipeSource, files: Files, data_parallel_size: int) -> Iterator[ConfigProblem]:
    """Yield the problems of values that the recipe and a strategy's file give differently."""
    for statement in files.statements:
        if statement.weak:
            continue
        with contextlib.suppress(InvalidValue):  # reported by the recipe's rules
            if statement.by == ACCUMULATION:
                text = (
                    ""
                    if _says_nothing(statement, files)
                    else _wrong_accumulation(source, statement, files, data_parallel_size)
                )
            else:
                text = _difference(source, statement)
            if text:
                place = statement.document.place(statement.path)
                yield ConfigProblem(place, ".".join(statement.path), f"found {describe(statement.written)}, but {text}")


def unheeded(source: RecipeSource, files: Files, data_parallel_size: int) -> dict[str, str]:
    """Return the reasons why values that tools write by themselves do not count, by their dotted keys; {} if all do."""
    reasons = {}
    for statement in files.statements:
        key = ".".join(statement.path)
        if statement.by == ACCUMULATION:
            if _says_nothing(statement, files) and _wrong_accumulation(source, statement, files, data_parallel_size):
                reasons[key] = "1 is what tools write by themselves, and the recipe's batch divides otherwise"
        elif statement.by == "precision" and statement.weak and _difference(source, statement):
            reasons[key] = f"tools write it by themselves, and {source.cite('precision')}"
    return reasons


def _says_nothing(statement: Statement, files: Files) -> bool:
    """Whether it is 1 accumulation step, the default of Accelerate and DeepSpeed, without the other parts of a batch.

    However the recipe's rows of a step are divided, their loss is the same.
    """
    return statement.values[0] == 1 and not any(other.by in (_ROWS, _MICRO) for other in files.statements)


def _difference(source: RecipeSource, statement: Statement) -> str:
    by, value = statement.by, source.value(statement.by)
    if by == "steps" and source.document.get("epochs") is not None:
        by, value = "epochs", None
    elif by == "schedule.warmup_steps" and value is None:
        if source.document.get("epochs") is None:
            value = num_warmup_steps(source.value("steps"), None, source.value("schedule.warmup_ratio"))
        by = "schedule.warmup_ratio"
    wanted = [list(one) if isinstance(one, tuple) else one for one in statement.values]
    if (list(value) if isinstance(value, tuple) else value) in wanted:
        return ""
    fix = 'write "auto" or remove it' if statement.auto else "remove it"
    return f"the recipe sets this: {source.cite(by)}; {fix}, or give the recipe {statement.by}={statement.values[0]}"


def _wrong_accumulation(source: RecipeSource, statement: Statement, files: Files, ranks: int) -> str:
    rows, micro, steps = source.value(_ROWS), source.value(_MICRO), statement.values[0]
    fix = 'write "auto" or remove it'
    if not isinstance(micro, int):
        return f"{source.cite(_MICRO)} leaves this open; {fix}"
    made = math.ceil(math.ceil(rows / ranks) / micro)
    if made == steps:
        return ""
    both = f"{source.cite(_ROWS)} and {source.cite(_MICRO)}"
    whole, rest = divmod(rows, micro * steps)
    also = {other.by: other.document.place(other.path) for other in files.statements}
    if _ROWS not in also:
        fix += f", or give the recipe {_ROWS}={micro * steps * ranks}"
    fix += f", or start {whole} data-parallel ranks" if whole and not rest else ""
    whose = "the recipe sets this: "
    if all(by in also and source.document.places.get(tuple(by.split("."))) == also[by] for by in (_ROWS, _MICRO)):
        whose, count = "", whole if whole and not rest else "no number of"
        fix = f"the file's three numbers fit {count} ranks; remove one of them"
    return f"{whose}{both}, which is {made} on {ranks} data-parallel ranks; {fix}"


def _is_given(recipe: Document, by: str) -> bool:
    return any(recipe.place(key).file not in recipe.scratch_files for key in _standing(recipe, by))


def _standing(recipe: Document, by: str) -> list[KeyPath]:
    """Those of the key and its alternatives that have a value."""
    path = tuple(by.split("."))
    others = [old for new, old in ALTERNATIVES if new == path and old[0] in ("epochs", "schedule")]
    return [key for key in (path, *others) if recipe.get(*key) is not None]


def _value(recipe: Document, by: str) -> Any:
    value = recipe.get(*by.split("."))
    if value is None:
        block, _, key = by.rpartition(".")
        fields = type(Recipe.model_fields[block].default).model_fields if block else Recipe.model_fields
        value = fields[key].default
    return list(value) if isinstance(value, tuple) else value


def _set(recipe: Document, by: str, value: Any, statement: Statement, taken: dict[str, str]) -> None:
    path: KeyPath = tuple(by.split("."))
    standing = _standing(recipe, by)
    for key in standing:
        if (there := recipe.place(key)) != recipe.rate_from_scratch:  # which has a note
            recipe.notes.append(f"{'.'.join(key)}: {recipe.get(*key)} of {there} was for a model from scratch")
    block = recipe.content
    for name in path[:-1]:
        if not isinstance(block.get(name), (dict, type(None))):
            return  # the schema reports it
        block[name] = dict(block.get(name) or {})
        block = block[name]
    for key in standing:
        del recipe.get(*key[:-1])[key[-1]]
    block[path[-1]] = value
    place = statement.document.place(statement.path)
    recipe.places[path] = place
    taken[by] = str(place)
