"""Rows of `data.source`, a function of the user's own: written to the cache once, and read from there as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config import own_code
from samecurve.errors import ConfigurationError, DataError
from samecurve.storage.cache import build_once, cache_folder, digest
from samecurve.storage.checksums import file_sha256
from samecurve.storage.verified_files import NewEntry

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

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
    files = [file_sha256(Path(value)) for _, value in sorted(options.items()) if _is_file(value)]
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


def _is_file(value: object) -> bool:
    return isinstance(value, str) and Path(value).is_file()
