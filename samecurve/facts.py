"""run.json's content: what runs, where, and by which versions."""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint.changes import identity
from .records import now
from .workers import num_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import Recipe
    from .engines.resolve import Plan
    from .tasks import Task

VERSIONED = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "peft",
    "datasets",
    "bitsandbytes",
    "torchao",
    "liger-kernel",
    "triton",
    "samecurve",
)


def run_facts(plan: Plan, arguments: Sequence[str], described: dict, data: dict, device: str) -> dict:
    """run.json's content, which is also the header's.

    arguments: train.py's. described: the live engine's own words (`engine`, `world_size`, `data_parallel_size`,
    `pipeline_stages`, `gradient_accumulation_steps`, `weight_dtype`, `reduce_dtype`, `num_parameters`,
    `num_parameters_per_rank`, ...) and what else the session knows (`model_type`, `attention`, `dropout`, `adapter`).
    data: the task's. device: its name, as a person would say it.
    """
    recipe, strategy = plan.recipe, plan.strategy
    return {
        **_typed(arguments),
        "output_dir": recipe.output_dir,
        "notes": plan.notes,
        "strategy": strategy.name,
        "strategy_path": strategy.path or strategy.deepspeed_path,
        "family": strategy.family,
        "launcher": strategy.launcher,
        **described,
        "device": device,
        "hardware": _hardware(),
        "precision": recipe.precision,
        "data": data,
        "recipe": recipe.model_dump(),
        "accelerate": strategy.accelerate,
        "deepspeed": strategy.deepspeed,
        "versions": versions(),
        "started": now(),
    }


def decisive(plan: Plan, skeleton: PreTrainedModel, task: Task) -> dict:
    """What decides whether a checkpoint's run may go on, and what a reader wants to know that changed since."""
    return {
        "recipe": plan.recipe.model_dump(),
        "strategy": plan.strategy.name,
        "world_size": plan.strategy.world_size,
        "versions": versions(),
        **identity(skeleton.config, task),
        "adapter": _adapter(plan.recipe),
        "reference": _reference(plan.recipe, task),
    }


def _adapter(recipe: Recipe) -> dict | None:
    """What its matrices fit to: their layers and sizes, and the frozen weights, wherever those lie now."""
    if recipe.adapter.name is None:
        return None
    from .adapter import fingerprint
    from .model import weight_files

    return recipe.adapter.model_dump() | {"base_model": fingerprint(weight_files(recipe.model.path))}


def _reference(recipe: Recipe, task: Task) -> str | None:
    """The pretrained weights that a task compares the model with, wherever they lie now."""
    if not task.has_reference or recipe.model.path is None:
        return None
    from .adapter import fingerprint
    from .model import weight_files

    return fingerprint(weight_files(recipe.model.path))


def _typed(arguments: Sequence[str]) -> dict:
    """The recipe's file and the overrides, so that `samecurve summary` can say how to do it again."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("recipe_path")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--strategy")
    parser.add_argument("--resume")
    parser.add_argument("--start_over", action="store_true")
    parser.add_argument("--local_rank")
    typed = parser.parse_intermixed_args(arguments)
    return {"recipe_path": typed.recipe_path, "overrides": typed.overrides}


def _hardware() -> dict[str, object]:
    """Of rank 0's process. cuda: the version that PyTorch was built with, None without."""
    import torch

    threads, cuda = torch.get_num_threads(), torch.version.cuda
    return {"processor": processor(), "cores": num_cores(), "threads": threads, "cuda": cuda}


def processor(about: Path = Path("/proc/cpuinfo")) -> str:
    """Linux's name for this machine's, or Python's, which is often empty. Family and model tell apart what some clouds
    call by one name."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in about.read_text(encoding="utf-8").splitlines())
        found = {key.strip(): value.strip() for key, _, value in lines}
        told = ", ".join(f"{key.removeprefix('cpu ')} {found[key]}" for key in ("cpu family", "model") if key in found)
        if "model name" in found:
            return f"{found['model name']} ({told})" if told else found["model name"]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Installed versions of what decides a run's numbers; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
