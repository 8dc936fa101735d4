"""Loads the task that the recipe's `task` names, with the rows of `data.source`, a function of the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config import own_code
from samecurve.errors import ConfigurationError, DataError, SamecurveError
from samecurve.interfaces.task import Task
from samecurve.specs.data_names import is_import_path
from samecurve.storage.cache import NewEntry, build_once, cache_folder, digest
from samecurve.storage.checksums import check_checksums, file_sha256

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.distributed.control_group import ControlGroup


def load_task(recipe: Recipe) -> Task:
    """Load the recipe's task with its tokenizer and rows.

    Raises:
        DataError: the data cannot be used.
        ConfigurationError: code of the user's own cannot be used, or the user has not named it (`own_code.load`).
    """
    module = "own" if is_import_path(recipe.task) else recipe.task
    return import_module(f".{module}", __package__).load_task(with_rows(recipe))


def load_on_all_ranks(recipe: Recipe, world: ControlGroup, busy: Callable[[], None] = lambda: None) -> Task:
    """Load the same task on every rank, after rank 0 has verified the model folders. Collective.

    Args:
        busy: called while files are verified.

    Raises:
        CheckpointError: on every rank, if a file of the initial model is not what its SHA256SUMS says.
        SamecurveError: on every rank, when rank 0 cannot load the task.
        DataError: when some ranks find other data than rank 0.
    """
    task, problem = None, None
    # Rank 0 loads first, because it may have to tokenise; the others then read its cache.
    if world.is_main:
        try:
            for path in recipe.model_paths:
                check_checksums(Path(path).expanduser(), busy)
            task = load_task(recipe)
        except SamecurveError as error:
            problem = error
    problem = world.broadcast(problem)
    if problem is not None:
        raise problem
    task = task or load_task(recipe)
    fingerprints = [None if rows is None else rows.fingerprint for rows in (task.train, task.validation)]
    others = world.conclude(fingerprints, lambda every: [rank for rank, own in enumerate(every) if own != every[0]])
    if others:
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        raise DataError(
            f"{recipe.data.name}: the data or the tokenizer of rank {shown} differ from those of rank 0; copy the "
            "same files to every machine"
        )
    return task


_FILE = "rows.jsonl"


def with_rows(recipe: Recipe) -> Recipe:
    """Return a recipe with the file of the rows as `data.path` in the place of `data.source`.

    The file is written once for the same module, options and content of the files that options name, so a resumed run
    reads the same rows, whatever the function would return now.

    Raises:
        ConfigurationError: see `own_code.load`; or the function is none.
        DataError: the function fails, or returns something else than rows.
    """
    path, options = recipe.data.source, recipe.data.source_options
    if path is None:
        return recipe
    function: Any = own_code.load(path, "data.source")
    if not callable(function):
        raise ConfigurationError(f"data.source: {path} is a {type(function).__name__}, not a function")
    texts = [value for _, value in sorted(options.items()) if isinstance(value, str)]
    files = [file_sha256(Path(text)) for text in texts if Path(text).is_file()]
    cache = cache_folder(recipe.data.cache_dir)

    def build(entry: NewEntry) -> None:
        num_rows = 0
        try:
            with entry.create(_FILE) as stream:
                rows: Any = function(**options)
                for row in rows:
                    if not isinstance(row, dict):
                        raise TypeError(f"row {num_rows + 1} is {row!r:.60}, not a dict")
                    stream.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
                    num_rows += 1
        except Exception as error:  # of any type: this runs the user's code
            text = f"{type(error).__name__} after {num_rows:,} rows: {error}"
            raise DataError(f"data.source: {path} failed with {text}") from error
        if not num_rows:
            raise DataError(f"data.source: {path} returned no rows")

    key = digest(path, own_code.source_hash(path), options, files)
    file = build_once(cache / "own_rows" / key, build, lambda entry: entry.path(_FILE))
    data = recipe.data.model_copy(update={"path": str(file), "source": None})
    return recipe.model_copy(update={"data": data})
