"""Loads the task that the recipe's `task` names: the module of that name, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.data.own_rows import with_rows
from samecurve.errors import DataError, SamecurveError
from samecurve.interfaces.task import Task
from samecurve.specs.data_names import is_import_path
from samecurve.storage.checksums import check_checksums

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
