"""Reference log-probabilities of preferences under the initial model, computed once and cached.

The live engine computes them before its first step. So the model is sharded as for training, and no second copy is
needed. With a new adapter the reference is the base model, because such an adapter adds nothing (its second matrix is
0); with one that goes on (`adapter.path`) it is the base model with that adapter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.batches import EvaluationBatches
from samecurve.errors import NumericError, SamecurveError
from samecurve.interfaces.task import identity
from samecurve.models.lora import start_of
from samecurve.models.weight_files import fingerprint, weight_files
from samecurve.specs.environment import versions
from samecurve.storage.cache import NewEntry, build_once, cache_folder, digest, is_whole
from samecurve.storage.terminal import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.data.datasets.preference import AnswerRows, JudgedRows
    from samecurve.interfaces.task import InitialState, Task

# Part of the cache key: raise it when the values for the same model and rows change.
_VERSION = 1
_MICRO_BATCHES = 16  # gathered in one call
_FILE = "log_probabilities.npy"


def provide_reference(rows: AnswerRows | JudgedRows, split: str, start: InitialState, model: str) -> None:
    """Set `rows.reference` from the cache, or compute it now. Collective: every rank calls it.

    `model` is the cache key of the model, see `model_key`; `split` names the rows in messages.

    Raises:
        StorageError: when the cache cannot be written.
        NumericError: for a model whose log-probabilities are not finite.
    """
    recipe, world = start.recipe, start.world
    key = digest(_VERSION, rows.fingerprint, model, recipe.precision)
    target = cache_folder(recipe.data.cache_dir) / "references" / key
    # each machine may have a cache of its own, and to compute the values takes all ranks
    if not world.conclude(is_whole(target), all):
        title, began = f"reference log-probabilities of {len(rows):,} {split}", time.perf_counter()
        parts: list[float] = []

        def line() -> str:
            return f"{title}: {sum(parts):.0%} in {time.perf_counter() - began:.1f} s"

        with progress_bar(title, 1.0, line, not world.is_main) as advance:
            values = compute_log_probabilities(rows, start, lambda part: (parts.append(part), advance(part)))
        num_broken = int((~np.isfinite(values)).any(axis=1).sum())
        if num_broken:
            raise NumericError(
                f"under the initial model, the log-probabilities of {num_broken} of {len(values)} {split} are "
                "not finite; use another precision, or other weights in model.path"
            )

        def save(entry: NewEntry) -> None:
            with entry.create(_FILE) as file:
                np.save(file, values)

        problem = None
        try:
            # in build_once, the other ranks would wait forever if this write failed
            if os.environ.get("LOCAL_RANK", "0") == "0":
                build_once(target, save, lambda entry: entry.path(_FILE))
        except SamecurveError as error:
            problem = error
        # an error of one rank is raised on all
        verdict = world.conclude(problem, lambda problems: next(filter(None, problems), None))
        if verdict is not None:
            raise verdict
    rows.reference = np.load(target / _FILE, mmap_mode="r")


def model_key(recipe: Recipe, skeleton: PreTrainedModel, task: Task) -> str:
    """Return the cache key of the initial model: a digest of its architecture and of the source of its weights."""
    architecture = identity(skeleton.config, task)["model"]
    if recipe.model.path is not None:
        weights = fingerprint(weight_files(recipe.model.path, recipe.model.revision))
        adapter = recipe.adapter
        start = (start_of(adapter), adapter.alpha, adapter.rslora) if adapter.path else ()
        return digest(architecture, weights, adapter.quantization, *start)
    # how weights are drawn may change with these versions
    return digest(architecture, recipe.seed, {name: versions()[name] for name in ("torch", "transformers")})


def compute_log_probabilities(
    rows: AnswerRows | JudgedRows, start: InitialState, advance: Callable[[float], object]
) -> np.ndarray:
    """Compute the log-probabilities of all answers: (rows, 2) fp32, the same on every rank.

    `advance` is called with each fraction that is done.
    """
    engine, num_ranks = start.engine, start.engine.shard[1]
    batches = EvaluationBatches(rows, start.recipe.batch.micro_batch_size, engine.shard, start.report_progress)
    size = batches.micro_batch_size
    values = np.empty((num_ranks, len(batches) * size, 2), dtype=np.float32)
    for first in range(0, len(batches), _MICRO_BATCHES):
        stop = min(first + _MICRO_BATCHES, len(batches))
        features = engine.features([batches[index] for index in range(first, stop)]).float().cpu().numpy()
        values[:, first * size : stop * size] = features.reshape(num_ranks, -1, 2)
        advance((stop - first) / len(batches))
    # The shards hold consecutive ranges of rows, in rank order.
    return values.reshape(-1, 2)[: len(rows)]
