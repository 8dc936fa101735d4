"""Reference log-probabilities of preference pairs under the initial model, computed once and cached.

The live engine computes them before its first step. So the model is sharded as for training, and no second copy is
needed. With an adapter the reference is the base model, because a new adapter adds nothing (its second matrix is 0).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.data.batches import EvaluationBatches
from samecurve.errors import DataError, NumericError, SamecurveError
from samecurve.interfaces.fingerprint import identity
from samecurve.models.lora import fingerprint
from samecurve.models.weight_files import weight_files
from samecurve.specs.environment import versions
from samecurve.storage.cache import build_once, cache_folder, digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.data.datasets.preference import AnswerRows
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine
    from samecurve.interfaces.task import Task

# Part of the cache key: raise it when the values for the same model and rows change.
_VERSION = 1
_MICRO_BATCHES = 16  # gathered in one call
_FILE = "log_probabilities.npy"
_PLAIN_LINE_SECONDS = 30.0


def provide(
    rows: AnswerRows,
    title: str,
    engine: Engine,
    recipe: Recipe,
    model: str,
    world: ControlGroup,
    alive: Callable[[], None],
) -> None:
    """Set `rows.reference` from the cache, or compute it now. Collective: every rank calls it.

    Args:
        rows: rows that get their reference.
        title: name of the rows, for messages.
        engine: engine with its initial weights, before a checkpoint is loaded.
        recipe: the whole recipe.
        model: cache key of the model, see `model_key`.
        world: control group of all ranks.
        alive: called for each micro-batch, to report progress to the watchdog.

    Raises:
        StorageError: when the cache cannot be written.
        DataError: for a damaged file in the cache.
        NumericError: for a model whose log-probabilities are not finite.
    """
    key = digest(_VERSION, rows.fingerprint, model, recipe.precision)
    target = cache_folder(recipe.data.cache_dir) / "references" / key
    if not all(world.all_gather_object(target.is_dir())):
        progress = partial(_progress, f"reference log-probabilities of {len(rows):,} {title} pairs", world.is_main)
        values = compute(rows, engine, recipe.batch.micro_batch_size, alive, progress)
        _check_finite(values, title)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _together(world, lambda: build_once(target, lambda folder: np.save(folder / _FILE, values)))
        else:
            _together(world, lambda: None)
    rows.reference = _together(world, lambda: _read(target / _FILE, len(rows)))


def model_key(recipe: Recipe, skeleton: PreTrainedModel, task: Task) -> str:
    """Return the cache key of the initial model: a digest of its architecture and of the source of its weights."""
    architecture = identity(skeleton.config, task)["model"]
    if recipe.model.path is not None:
        weights = fingerprint(weight_files(recipe.model.path))
        return digest(architecture, weights, recipe.adapter.quantization)
    return digest(architecture, recipe.seed, {name: versions()[name] for name in ("torch", "transformers")})


def compute(
    rows: AnswerRows,
    engine: Engine,
    micro_batch_size: int,
    alive: Callable[[], None],
    progress: Callable,
) -> np.ndarray:
    """Compute the log-probabilities of all answers.

    Args:
        rows: preference pairs.
        engine: engine with its initial weights.
        micro_batch_size: most pairs per forward pass of a rank.
        alive: called for each micro-batch.
        progress: returns a context manager, which yields a function to call with the fraction done.

    Returns:
        (rows, 2) fp32, the same on every rank.
    """
    batches = EvaluationBatches(rows, micro_batch_size, engine.shard, alive)
    size = batches.micro_batch_size
    found = np.empty((engine.shard[1], len(batches) * size, 2), dtype=np.float32)
    with progress() as done:
        for start in range(0, len(batches), _MICRO_BATCHES):
            stop = min(start + _MICRO_BATCHES, len(batches))
            values = engine.features([batches[index] for index in range(start, stop)]).float().cpu().numpy()
            together = slice(start * size, stop * size)
            found[:, together] = values.reshape(engine.shard[1], -1, 2)
            done(stop / len(batches))
    # The shards hold consecutive ranges of rows, in rank order.
    return found.reshape(-1, 2)[: len(rows)]


def _together(world: ControlGroup, call: Callable[[], Any]) -> Any:
    """Return the result of `call` on this rank, after all ranks have called. Raises an error of one rank on all."""
    result, problem = None, None
    try:
        result = call()
    except SamecurveError as error:
        problem = error
    verdict = next((found for found in world.all_gather_object(problem) if found is not None), None)
    if verdict is not None:
        raise verdict
    return result


def _check_finite(values: np.ndarray, title: str) -> None:
    broken = int((~np.isfinite(values)).any(axis=1).sum())
    if broken:
        raise NumericError(
            f"the model that the run begins with gives {broken} of {len(values)} {title} pairs a log-probability that "
            "is not finite; use another precision, or other weights in model.path"
        )


def _read(file: Path, num_rows: int) -> np.ndarray:
    try:
        values = np.load(file, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: could not be read ({error}); delete {file.parent}") from error
    if values.shape != (num_rows, 2) or not np.isfinite(values).all():
        raise DataError(f"{file}: does not hold two finite numbers for each of {num_rows} pairs; delete {file.parent}")
    return values


@contextmanager
def _progress(title: str, prints: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal, else print a line every 30 s and one at the end."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(quiet=not prints, soft_wrap=True)
    began = last_line = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)

        def done(part: float) -> None:
            nonlocal last_line
            bar.update(task, completed=part)
            if not console.is_terminal and time.perf_counter() - last_line > _PLAIN_LINE_SECONDS:
                last_line = time.perf_counter()
                console.print(f"{title}: {part:.0%}", highlight=False)

        yield done
    console.print(f"{title} in {time.perf_counter() - began:.1f} s", highlight=False)
