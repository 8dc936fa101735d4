"""Translation of another trainer's configuration, key by key, into the values of a recipe.

Each key of such a file becomes values of the recipe, or is without effect here, or has no equal. Nothing is dropped
without a word: a key that no table has is without an equal, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samecurve.errors import ConfigurationError


class NoEffect(NamedTuple):
    """The run is the same without this key: why."""

    reason: str


class NoEqual(NamedTuple):
    """The training would differ: what comes nearest here."""

    nearest: str


Settings = Mapping[str, Any]  # all keys of the file, and the trainer's defaults of those that it does not have
# The recipe's key, or a function of the value and all settings that returns the recipe's values, {} for its defaults. A
# NoEqual among them is of a part of the value, by its name.
Rule = str | NoEffect | NoEqual | Callable[[Any, Settings], dict[str, Any] | NoEffect | NoEqual]
OFF = (None, False, "", "none", "no", 0, [], {})


@dataclass(frozen=True)
class Trainer:
    """What a trainer's keys mean.

    Attributes:
        name: as its users write it.
        rules: by key.
        defaults: its own values of keys that a file may leave out, where the recipe's default is another one.
        task: the recipe's task; raises ConfigurationError for a method that is not built.
        nulls: keys whose null has a meaning of its own; elsewhere null is the default.
    """

    name: str
    rules: Mapping[str, Rule]
    defaults: Callable[[Settings], dict[str, Any]]
    task: Callable[[Settings], str]
    nulls: tuple[str, ...] = ()


@dataclass
class Translation:
    """Attributes:
    values: by key of the recipe.
    origins: by key of the recipe, the keys that it comes from.
    no_effect, no_equal: by key of the file, why, and what comes nearest.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)
    no_equal: dict[str, str] = field(default_factory=dict)


def translate(trainer: Trainer, given: Settings) -> Translation:
    """Translate the keys of a file, and the defaults that it relies on.

    Raises:
        ConfigurationError: the file's method is not built here, or a value is none of its key.
    """
    absent = [key for key, value in given.items() if value is None and key not in trainer.nulls]
    made = Translation(no_effect=dict.fromkeys(absent, "null"))
    given = {key: value for key, value in given.items() if key not in absent}
    settings = {**trainer.defaults(given), **given}
    made.values["task"] = trainer.task(settings)
    for key, value in settings.items():
        rule = trainer.rules.get(key)
        if rule is None:
            close = difflib.get_close_matches(key, trainer.rules, 1, 0.8)
            rule = NoEqual(f"not a key of {trainer.name} that is known here" + (f"; {close[0]} is" if close else ""))
        try:
            answer = rule(value, settings) if callable(rule) else {rule: value} if isinstance(rule, str) else rule
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(f"{key}: found {value}, which {trainer.name} does not have there") from error
        if isinstance(answer, NoEqual) and value in OFF:
            answer = NoEffect("off")
        if isinstance(answer, NoEffect):
            made.no_effect |= {key: answer.reason} if key in given else {}
        elif isinstance(answer, NoEqual):
            made.no_equal[key] = answer.nearest
        else:
            for name, translated in answer.items():
                if isinstance(translated, NoEqual):
                    made.no_equal[name] = translated.nearest
                    continue
                made.values[name] = translated
                made.origins.setdefault(name, []).append(key if key in given else f"{key}, {trainer.name}'s default")
    return made
