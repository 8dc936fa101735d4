"""Variants of a strategy: copies of its files with changed keys, to measure the effect of a key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from samecurve.config.documents import Document, format_problems
from samecurve.config.overrides import apply_override
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.strategy.accelerate_keys import ACCELERATE
from samecurve.strategy.deepspeed_keys import DEEPSPEED
from samecurve.strategy.translation import read_as_written


def is_key(argument: str) -> bool:
    """Whether `key.path=value` is for a strategy's file. Names of the recipe take precedence."""
    head = _head(argument)
    return head not in Recipe.model_fields and (head in ACCELERATE or head in DEEPSPEED)


def write_changed(path: Path, arguments: Sequence[str], folder: Path) -> Path:
    """Write copies of the strategy's YAML and JSON with changed keys to `folder`, under the same file names.

    Args:
        path: the strategy file.
        arguments: `key.path=value`. The run validates keys and values.

    Returns:
        The file to use instead of `path`.

    Raises:
        ConfigurationError: a key belongs to a file that the strategy does not have.
    """
    files = read_as_written(str(path))
    for argument in arguments:
        document = files.accelerate if _head(argument) in ACCELERATE else files.deepspeed
        if not document.name:
            kind = "Accelerate YAML" if document is files.accelerate else "DeepSpeed JSON"
            raise ConfigurationError(f"{argument}: a key of a {kind}, but {path} has none; choose another --strategy")
        apply_override(document, argument)
    problems = files.accelerate.problems + files.deepspeed.problems
    if problems:
        raise ConfigurationError(format_problems(problems))
    folder.mkdir(parents=True, exist_ok=True)
    if not files.deepspeed.name:
        return _written(files.accelerate, folder)
    json_path = _written(files.deepspeed, folder)
    if not files.accelerate.name:
        return json_path
    # the YAML would still name the unchanged JSON
    files.accelerate.content["deepspeed_config"]["deepspeed_config_file"] = str(json_path)
    return _written(files.accelerate, folder)


def _head(argument: str) -> str:
    return argument.partition("=")[0].partition(".")[0]


def _written(document: Document, folder: Path) -> Path:
    path = folder / Path(document.name).name
    path.write_text(json.dumps(document.content, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    return path.absolute()
