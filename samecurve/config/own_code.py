"""Classes and functions of the user's own, which a recipe names by import path: `my_package.my_task:MyTask`.

An import path is code. It is imported only where a recipe file, the command line or `--own_code` named it to this
process (`allow`). A recipe that is read from a run folder or a checkpoint allows nothing: a stranger may have made it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from modulefinder import ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import Document, joined
from samecurve.errors import ConfigurationError
from samecurve.specs.data_names import is_import_path
from samecurve.storage.cache import digest
from samecurve.storage.checksums import file_sha256

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

OPTION = "--own_code"
KEYS = ("task", "optimizer.name", "data.source")
_allowed: dict[str, tuple[str, ...]] = {}  # by import path: the folders that its module is looked up in


def allow(paths: Iterable[str], folders: Sequence[str]) -> None:
    """Allow import paths that the user named. `folders`: where their modules are looked up before sys.path."""
    for path in paths:
        _allowed[path] = tuple(dict.fromkeys(map(os.path.abspath, folders)))


def allowed() -> dict[str, tuple[str, ...]]:
    """Return what is allowed here, for a process that continues the work of this one."""
    return dict(_allowed)


def allow_recipe(document: Document) -> None:
    """Allow the import paths in a recipe of the user's, and report the modules that do not exist.

    A module is looked up beside the file with the key, beside the recipe, in the working directory and on sys.path.
    """
    for key in KEYS:
        path, place = document.get(*key.split(".")), document.place(tuple(key.split(".")))
        if not is_import_path(path):
            continue
        files = [file for file in (place.file, document.name) if os.path.isfile(file)]
        allow([path], [*(os.path.dirname(file) or "." for file in files), "."])
        if problem := _missing(path):
            document.problem(tuple(key.split(".")), problem)


def load(path: str, key: str) -> Any:
    """Import the class or function of an import path, the value of a recipe's `key`.

    Raises:
        ConfigurationError: the user has not named it, or there is no such module or name, or its import fails.
    """
    if path not in _allowed:
        raise ConfigurationError(
            f"{key}: found {path} in the recipe of a run folder, which may be a stranger's: Python code runs only if "
            f"your own recipe or command line names it; read that code, and if you trust it add {OPTION} {path}"
        )
    if problem := _missing(path):
        raise ConfigurationError(f"{key}: {problem}")
    module, _, name = path.partition(":")
    file = _file(path)
    if file is not None and str(file[0]) not in sys.path:
        sys.path.append(str(file[0]))  # the last one, so that the user's json.py does not replace Python's
        importlib.invalidate_caches()
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # of any type: this runs the user's code
        raise ConfigurationError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    origin = getattr(imported, "__file__", None)
    if file is not None and (origin is None or not os.path.samefile(origin, file[1])):
        raise ConfigurationError(
            f"{key}: {path} is in {file[1]}, but Python imports another module {module}, from {origin}; rename yours"
        )
    if not hasattr(imported, name):
        names = [own for own, value in vars(imported).items() if getattr(value, "__module__", "") == module]
        listed = f"it has {joined(names, 'and')}" if names else "it defines no class or function"
        raise ConfigurationError(f"{key}: found {path}, but {origin} has no {name}; {listed}")
    return getattr(imported, name)


def check_subclass(path: str, key: str, value: Any, base: type) -> None:
    """Raise ConfigurationError unless an import path names a subclass of `base`."""
    if not isinstance(value, type) or not issubclass(value, base):
        what = f"class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise ConfigurationError(f"{key}: {path} is {what}, not a subclass of {base.__module__}.{base.__name__}")


def source_hash(path: str) -> str:
    """Hash the module of an allowed import path and the modules beside it that it imports, directly or not."""
    place = _file(path)
    if place is None:
        return "unknown"
    folder, file = place
    files = {file}
    if str(folder) in _allowed[path]:  # of an installed package only the module itself: it may import all of torch
        # another version of samecurve is another version of the run
        finder = ModuleFinder(path=[str(folder)], excludes=["samecurve"])
        with contextlib.suppress(ImportError, SyntaxError):  # the module's own import reports it
            finder.import_hook(path.partition(":")[0])
        own_files = (getattr(module, "__file__", None) for module in finder.modules.values())
        files |= {Path(name) for name in own_files if name}
    return digest(sorted((str(own.relative_to(folder)), file_sha256(own)) for own in files))


def hashes(recipe: Recipe) -> dict[str, str]:
    """Return the source hash of each import path that the recipe names, for run.json and checkpoints."""
    values = (recipe.task, recipe.optimizer.name, recipe.data.source)
    return {path: source_hash(path) for path in values if path in _allowed}


def _missing(path: str) -> str:
    module = path.partition(":")[0]
    if _file(path) is not None or importlib.util.find_spec(module.partition(".")[0]) is not None:
        return ""
    folders = joined(dict.fromkeys([*_allowed[path], "Python's own (PYTHONPATH, installed packages)"]), "and")
    return f"found {path}, but there is no module {module}; folders searched: {folders}"


def _file(path: str) -> tuple[Path, Path] | None:
    """Find the folder that a module is imported from, and its file; None if it is no file in the folders searched."""
    parts = path.partition(":")[0].split(".")
    for folder in map(Path, (*_allowed[path], *sys.path)):
        for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if os.path.isfile(file):
                return folder, file
    return None
