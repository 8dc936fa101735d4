"""Options of `plan` that would be ignored beside others, or without them."""

from __future__ import annotations

import argparse
from typing import Any

from samecurve.errors import ConfigurationError

OF_TABLES = ("runs", "json", "calibrate")  # all that --runs takes
# Options, and those of which each needs one.
NEEDED = {"rank": ("ranks", "dry_run"), "launcher": ("output",), "order": ("layout",)}
POSITIONAL = {"model": "MODEL_OR_RECIPE", "overrides": "key=value"}


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for options without effect, naming what each needs, and for those that are missing."""
    given = {name: value for name, value in vars(arguments).items() if value is not False and value not in (None, [])}
    if arguments.runs:
        beside = [
            _name(name) for name in sorted(given, key=lambda name: name not in POSITIONAL) if name not in OF_TABLES
        ]
        problems = [f"--runs {arguments.runs}: each row says its model and machines; leave out {', '.join(beside)}"]
        problems = problems if beside else []
        if not arguments.json:
            problems.append("--runs: the predictions need a file; add --json OUT.json")
    elif given.keys() == {"calibrate"}:
        return  # to learn, without a plan
    else:
        problems = [*_missing(given), *_without_effect(given)]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _missing(given: dict[str, Any]) -> list[str]:
    if "model" in given and "cluster" in given:
        return []
    return ["plan needs MODEL_OR_RECIPE and --cluster, for example --cluster h100x8; or --runs"]


def _without_effect(given: dict[str, Any]) -> list[str]:
    problems = []
    for name, needed in NEEDED.items():
        if name in given and not given.keys() & set(needed):
            value = given[name]
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            problems.append(f"{_name(name)} {words}: it has no effect alone; add {' or '.join(map(_name, needed))}")
    return problems


def _name(option: str) -> str:
    return POSITIONAL.get(option, f"--{option}")
