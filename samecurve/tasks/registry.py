"""Loads the task that the recipe's `task` names: the module of that name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from samecurve.errors import DataError, SamecurveError
from samecurve.interfaces.task import Task

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.distributed.control_group import ControlGroup


def load_task(recipe: Recipe) -> Task:
    """Load the recipe's task with its tokenizer and rows. Raises DataError when the data cannot be used."""
    return import_module(f".{recipe.task}", __package__).load_task(recipe)


def load_on_all_ranks(recipe: Recipe, world: ControlGroup) -> Task:
    """Load the same task on every rank. Collective: every rank calls it.

    Raises:
        SamecurveError: on every rank, when rank 0 cannot load the task.
        DataError: when some ranks find other data than rank 0.
    """
    task, problem = None, None
    # Rank 0 loads first, because it may have to tokenise; the others then read its cache.
    if world.is_main:
        try:
            task = load_task(recipe)
        except SamecurveError as error:
            problem = error
    problem = world.broadcast(problem)
    if problem is not None:
        raise problem
    task = task or load_task(recipe)
    fingerprints = [None if rows is None else rows.fingerprint for rows in (task.train, task.validation)]
    others = world.conclude(fingerprints, lambda every: [rank for rank, each in enumerate(every) if each != every[0]])
    if others:
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        raise DataError(
            f"{recipe.data.name}: the data or the tokenizer of rank {shown} differ from those of rank 0; copy the "
            "same files to every machine"
        )
    return task
