"""`adopt`: writes the first checkpoint of a run from a checkpoint of another library, in one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from samecurve.checkpoint.foreign import MOMENTS, ForeignCheckpoint, Names
from samecurve.checkpoint.foreign_formats import read_foreign
from samecurve.checkpoint.manager import TrainProgress
from samecurve.data.sampler import Steps
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.errors import ConfigurationError
from samecurve.interfaces.sharded_state import AVERAGE, FACTOR, WEIGHT
from samecurve.metrics.console import Progress
from samecurve.models.lora import NAME, trained_shapes
from samecurve.optim.parameter_groups import roles_of
from samecurve.optim.schedule import learning_rate
from samecurve.run.run_directory import RunDirectory
from samecurve.training import startup
from samecurve.training.session import Context

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.interfaces.engine import Engine
    from samecurve.run.lifecycle import RunSupervisor
    from samecurve.strategy.plan import Plan


# no other process waits for this one, so nothing watches its phases
UNWATCHED = cast(
    "RunSupervisor", SimpleNamespace(phase=lambda *_: None, progress=lambda: None, local_progress=lambda: None)
)


def run(plan: Plan, path: Path) -> int:
    """Write weights, moments and position of the newest checkpoint below `path` into the recipe's output_dir.

    Raises:
        ConfigurationError, CheckpointError: as read_foreign; also where output_dir has checkpoints, or the recipe ends
            at the checkpoint's step.
        DataError, StorageError: the recipe's rows cannot be read, or output_dir cannot be written.
    """
    with closing(RunDirectory(plan.recipe.output_dir, reads=(path,))) as directory:
        accelerator = factory.build_accelerator(plan)
        progress = Progress(plan.recipe.steps, 1, enabled=True)
        context = Context(plan, accelerator, directory, UNWATCHED, ControlGroup(), progress)
        context, built, checkpoints = startup.prepare(context)
        recipe = context.recipe
        adopted = read_foreign(path, names_of(built.skeleton), built.skeleton)
        if adopted.step >= recipe.steps:
            raise ConfigurationError(
                f"steps: {recipe.steps}, but {adopted.folder} is at step {adopted.step} already; set steps to the "
                "number of all steps, those of the checkpoint included"
            )
        engine = factory.build(accelerator, context.plan, built.skeleton, built.task)
        take_over(adopted, engine, recipe)
        samples = adopted.step * recipe.batch.global_batch_size
        anchor = Steps.of(recipe.batch.global_batch_size).history
        checkpoints.save(engine, TrainProgress(adopted.step, adopted.updates, samples, anchor=anchor), wait=True)
        written = ", ".join(["weights", *MOMENTS] if adopted.moments else ["weights"])
        print(f"{adopted.folder} ({adopted.format}), step {adopted.step}: {written} are in {directory.checkpoints}")
        for line in (*adopted.missing, *differences(adopted, recipe)):
            print(f"  {line}")
        order = f"{adopted.step} steps of {recipe.batch.global_batch_size} rows (batch.global_batch_size)"
        print(f"  rows: the run goes on at row {samples:,} of the recipe's own order: {order}")
    return 0


def names_of(skeleton: Any) -> Names:
    """Collect the names under which a checkpoint may have the parameters of a model on the meta device."""
    tied: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    shapes = trained_shapes(skeleton)
    aliases = {}
    for names in tied.values():
        if names[0] in shapes:
            # peft leaves the adapter's name out of its files, and puts `base_model.model.` before all
            aliases[names[0]] = [*names, *(name.replace(f".{NAME}.", ".") for name in names if f".{NAME}." in name)]
    known = {name for names in tied.values() for name in names} | {name for name, _ in skeleton.named_buffers()}
    known |= {alias for names in aliases.values() for alias in names}
    every = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    return Names(shapes, {name: aliases[name] for name in shapes}, known, every, roles_of(skeleton))


def take_over(adopted: ForeignCheckpoint, engine: Engine, recipe: Recipe) -> None:
    """Copy weights and moments into the engine of one process, and set Adam's step counter."""
    kinds = {kind for kinds in engine.state.kinds.values() for kind in kinds} - {AVERAGE, FACTOR}
    if adopted.moments and kinds != {WEIGHT, *MOMENTS}:
        adopted.moments, adopted.updates = {}, 0
        adopted.missing.append(f"optimizer.name: {recipe.optimizer.name} has other states than AdamW, and begins anew")
    with torch.no_grad():
        for part, kind, tensor in engine.state.visit(writing=True):
            if kind == WEIGHT:
                tensor.copy_(adopted.weights[part.name].reshape(-1))
            elif adopted.moments and kind in MOMENTS:
                tensor.copy_(adopted.moments[part.name][kind].reshape(-1))
        engine.state.finish(adopted.updates)


def differences(adopted: ForeignCheckpoint, recipe: Recipe) -> list[str]:
    """List the optimizer's settings that differ from the recipe's, each with the key that keeps the checkpoint's."""
    lines, settings = [], adopted.settings
    for key, name in (("betas", "betas"), ("epsilon", "eps"), ("weight_decay", "weight_decay")):
        value, own = settings.get(name), getattr(recipe.optimizer, key)
        if value is not None and (tuple(value) if key == "betas" else value) != own:
            shown = str(list(value) if key == "betas" else value).replace(" ", "")
            lines.append(f"optimizer.{key}: {own} in the recipe; the checkpoint has optimizer.{key}={shown}")
    if settings.get("undecayed") == 0 and settings.get("weight_decay"):
        lines.append("weight decay: the checkpoint's optimizer decays norms and biases, too, which a recipe never does")
    planned = learning_rate(recipe, adopted.updates + 1)
    rate = settings.get("lr", planned)
    if abs(planned - rate) > 1e-6 * rate:
        lines.append(
            f"learning rate of the next step: {planned:g} by the recipe, {rate:g} in the checkpoint; see "
            "optimizer.learning_rate, steps and schedule"
        )
    return lines
