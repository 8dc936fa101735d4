"""Recipes of a small model on rows of a test, and the files of these rows."""

from __future__ import annotations

import json
from pathlib import Path

from samecurve.config.schema import Recipe


def jsonl(path: Path, *rows: dict | str) -> Path:
    """rows: objects, or lines as they are."""
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def content(folder: Path, path: Path | str | None, task: str = "sft", **changes) -> dict:
    """A recipe of one step on the data at `path`, with its run and its cache in `folder`.

    Args:
        changes: keys by their names. A block replaces what it names of the block here; a model or a tokenizer with a
            path replaces all of it.
    """
    values = {
        "task": task,
        "output_dir": str(folder / "run"),
        "steps": 1,
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocabulary_size": 270},
        "data": {"path": path and str(path), "cache_dir": str(folder / "cache")},
        "batch": {"global_batch_size": 1, "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"warmup_steps": 0},
    }
    for key, change in changes.items():
        is_whole = not isinstance(change, dict) or (key in ("model", "tokenizer") and "path" in change)
        values[key] = change if is_whole else {**values.get(key, {}), **change}
    return values


def make_recipe(folder: Path, path: Path | str, task: str = "sft", **changes) -> Recipe:
    return Recipe.model_validate(content(folder, path, task, **changes))


def recipe_file(folder: Path, path: Path | str | None, task: str = "sft", **changes) -> str:
    """The path of `content` as a file."""
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(content(folder, path, task, **changes)))
    return str(file)
