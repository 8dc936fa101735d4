"""`export --format`: a run's checkpoint in the format of Accelerate's save_state, or of torch's DCP, to train on there.

accelerate   model.safetensors, optimizer.bin, scheduler.bin: for `accelerator.load_state(FOLDER)`
dcp          {"model": ..., "optimizer": ..., "step": ...} by parameter name: for `torch.distributed.checkpoint.load`
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.optim.lr_scheduler import LambdaLR

from samecurve.checkpoint.foreign import MOMENTS
from samecurve.checkpoint.resume import read_state
from samecurve.config.schema import Recipe
from samecurve.export.convert import OpenedCheckpoint, open_checkpoint
from samecurve.export.hf_export import put_in_place
from samecurve.interfaces.region import Region
from samecurve.models.weights import constant_tensors, frozen_tensors
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.optim.schedule import learning_rate, set_learning_rate
from samecurve.storage.atomic import storage_errors


def run(folder: Path, output: Path, recipe: Recipe, format: str) -> int:
    """Write the checkpoint `folder` of a run as `output`, in "accelerate" or "dcp" format. Returns the exit code.

    Raises:
        CheckpointError, DataError: as open_checkpoint.
        StorageError: `output` exists or cannot be written.
    """
    opened, saved = open_checkpoint(folder, recipe), read_state(folder)
    parameters = {name: nn.Parameter(tensor) for name, tensor in opened.weights()}
    optimizer = optimizer_of(opened, parameters, recipe, saved["updates"])
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    weights |= {**dict(constant_tensors(opened.skeleton, recipe)), **dict(frozen_tensors(opened.skeleton, recipe))}
    partial = output.with_name(f"{output.name}.partial")
    try:
        with storage_errors(output):
            shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
            partial.mkdir(parents=True)
            if format == "dcp":
                # DCP wants every name of a model's state_dict, those of tied weights included
                first = {id(parameter): name for name, parameter in opened.skeleton.named_parameters()}
                every = opened.skeleton.named_parameters(remove_duplicate=False)
                weights |= {name: weights[first[id(parameter)]] for name, parameter in every}
                states = {"model": weights, "step": saved["step"]}
                states |= {"optimizer": _by_name(optimizer, parameters)} if optimizer else {}
                dcp.save(states, checkpoint_id=str(partial), no_dist=True)
            else:
                save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
                if optimizer:
                    torch.save(optimizer.state_dict(), partial / "optimizer.bin")
                    updates, peak = saved["updates"], recipe.optimizer.learning_rate
                    factor = learning_rate(recipe, updates + 1) / peak
                    # of torch's functions, which a script has itself, nothing is saved
                    schedule = LambdaLR(optimizer, lambda _: factor, last_epoch=updates - 1)
                    assert schedule.last_epoch == updates
                    torch.save(schedule.state_dict(), partial / "scheduler.bin")
            put_in_place(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{folder}, step {saved['step']}, for {format}: {output}")
    print("  random states are not in it, and its reader has to skip the rows that were read:")
    print(f"  {saved['samples']:,} rows in {saved['step']:,} steps")
    if not optimizer:
        print(f"  optimizer.name: {recipe.optimizer.name} has other states than AdamW, and would begin anew")
    return 0


def optimizer_of(
    opened: OpenedCheckpoint, parameters: dict[str, nn.Parameter], recipe: Recipe, updates: int
) -> torch.optim.AdamW | None:
    """Build torch's AdamW with the checkpoint's moments and the rate of the next update; None for other optimizers.

    Its groups are transformers': the weights that decay, then the others, each in the model's order.
    """
    if recipe.optimizer.name != "adamw":
        return None
    settings = recipe.optimizer
    groups = parameter_groups(parameters.items(), settings, roles_of(opened.skeleton))
    optimizer = torch.optim.AdamW(groups, settings.learning_rate, settings.betas, settings.epsilon)
    for name, parameter in parameters.items():
        whole = Region(0, parameter.numel())
        moments = {kind: opened.reader.read(name, kind, whole).view_as(parameter) for kind in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
    for group in optimizer.param_groups:
        # of torch's schedules; DCP wants the same keys where it loads
        group["initial_lr"] = settings.learning_rate * group.get("rate_factor", 1.0)
    set_learning_rate(optimizer, learning_rate(recipe, updates + 1))
    return optimizer


def _by_name(optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter]) -> dict:
    """Return the optimizer's state as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict does."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = optimizer.state_dict()
    groups = [
        group | {"params": [names[id(parameter)] for parameter in live["params"]]}
        for group, live in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {"state": {name: optimizer.state[p] for name, p in parameters.items()}, "param_groups": groups}
