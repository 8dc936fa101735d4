"""Writes the files that start a plan: strategy, recipe where there is none, cluster, the plan, launch scripts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from samecurve.config import loader
from samecurve.config.inheritance import latest_overrides
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.launch import scripts
from samecurve.launch.target import Target, command, read_back, unnamed
from samecurve.planner import cluster, inputs, model_shape, plan_text
from samecurve.planner.cluster import Cluster
from samecurve.planner.inputs import PlanRequest
from samecurve.planner.search import Choice
from samecurve.storage.atomic import storage_errors
from samecurve.storage.records import read_record


@dataclass(frozen=True)
class Typed:
    """The typed arguments: MODEL_OR_RECIPE and the overrides."""

    model: str
    overrides: tuple[str, ...]


def emit(
    folder: str, choice: Choice, request: PlanRequest, machines: Cluster, typed: Typed, launchers: Sequence[str]
) -> list[str]:
    """Write everything that starts a choice, and read it back as the run would. Returns the files' paths.

    Nothing of this plan stays in the folder if the run would refuse it.

    Args:
        folder: where to write; created if it does not exist. Files of an earlier plan are replaced or removed.
        choice: one that can run, of a strategy with files.
        typed: the recipe that was planned, or the model to make one for, and the overrides.
        launchers: names from target.LAUNCHERS, for which to write start scripts.

    Raises:
        ConfigurationError: the configuration's own check refuses what was written, or a file of the user's would be
            lost.
    """
    assert choice.template and choice.sizes is not None  # shapes without files are never emitted
    recipe = typed.model if inputs.is_recipe(typed.model) else os.path.join(folder, "recipe.yaml")
    values = strategy_values(choice, request) + recipe_values(choice, request)
    overrides = tuple(latest_overrides([*typed.overrides, *values]))
    strategy = os.path.join(folder, "strategy.yaml")
    nodes = unnamed(machines.nodes, machines.gpus_per_node)
    target = Target(recipe, strategy, overrides, nodes, folder=folder)
    texts = _strategy(folder, choice) | {"cluster.yaml": cluster.cluster_text(machines)}
    if not inputs.is_recipe(typed.model):
        bare = inputs.bare_recipe(typed.model, model_shape.read(typed.model))
        about = f"# The job that was planned for {typed.model}; data.path is for you to add.\n"
        texts["recipe.yaml"] = about + yaml.safe_dump(bare, sort_keys=False)
    record = {"recipe": recipe, "overrides": overrides, "launchers": list(launchers), **plan_text.record(choice)}
    assert choice.job
    for launcher in launchers:
        texts |= scripts.files(launcher, target)
    names = write_files(folder, texts, record)
    try:
        _check(target, launchers, _planned(choice, request))
    except SamecurveError:
        with storage_errors(Path(folder)):  # nobody shall start what turned out to be refused
            for name in names:
                (Path(folder) / name).unlink(missing_ok=True)
        raise
    return [os.path.join(folder, name) for name in names]


def strategy_values(choice: Choice, request: PlanRequest) -> list[str]:
    """Return the overrides for what the recipe has from the strategy's files, which the emitted files do not hold."""
    assert choice.template
    files, document = choice.template.files, request.source.document
    names = {files.accelerate.name, files.deepspeed.name} - {""}
    keys = [".".join(path) for path, place in document.places.items() if place.file in names]
    return [f"{key}={json.dumps(request.source.value(key))}" for key in keys]


def recipe_values(choice: Choice, request: PlanRequest) -> list[str]:
    """Return the overrides by which the choice differs from the recipe; only what the search may choose."""
    assert choice.job
    changes = request.changes(choice.job.micro_batch, choice.job.checkpointing, choice.job.dims.dp)
    return [f"{block}.{key}={value}" for block, keys in changes.items() for key, value in keys.items()]


def _strategy(folder: str, choice: Choice) -> dict[str, str]:
    """Return the strategy's files with the sizes of the choice."""
    assert choice.template and choice.job
    files = choice.template.sized(choice.sizes or {})
    accelerate = {**files.accelerate.content, "num_processes": choice.job.dims.world_size}
    texts = {}
    if files.deepspeed.name:
        name = os.path.join(folder, "strategy.json")
        texts["strategy.json"] = json.dumps(files.deepspeed.content, indent=2) + "\n"
        # a strategy that is a DeepSpeed JSON alone gets its Accelerate file here
        block = accelerate.get("deepspeed_config", {})
        accelerate |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {**block, "deepspeed_config_file": name}}
    named = f"{choice.name}, {plan_text.sizes(choice.job)}"
    about = f"# {named}: {choice.template.path} with the sizes of a plan; plan.json says how fast it should be.\n"
    return {"strategy.yaml": about + yaml.safe_dump(accelerate, sort_keys=False), **texts}


def _planned(choice: Choice, request: PlanRequest) -> Recipe:
    assert choice.job and request.source.recipe
    recipe = request.source.recipe
    changes = request.changes(choice.job.micro_batch, choice.job.checkpointing, choice.job.dims.dp)
    blocks = {block: getattr(recipe, block).model_copy(update=keys) for block, keys in changes.items()}
    return recipe.model_copy(update=blocks)


PLACES = {"output_dir", "data", "evaluate", "model", "tokenizer"}  # blocks with paths, which are read otherwise there


def _check(target: Target, launchers: Sequence[str], planned: Recipe) -> None:
    """Resolve every launcher's command as its processes would; all have to come to the job that was planned.

    Data may be missing.
    """
    elsewhere = loader.data_elsewhere(loader.read_recipe(target.recipe, target.overrides))
    # the data may be on the planned machines only
    here = [f"{key}={loader.STAND_INS[key]}" for key in sorted(elsewhere)]
    target = replace(target, overrides=tuple(latest_overrides([*target.overrides, *here])))
    resolved = []
    for launcher in launchers:
        plan = read_back(launcher, target, command(launcher, target))
        resolved.append((plan.recipe, plan.strategy.sharding, plan.strategy.dims, plan.strategy.deepspeed))
    if any(other != resolved[0] for other in resolved):
        raise ConfigurationError(f"{target.folder}: the launchers {', '.join(launchers)} resolve to different plans")
    wanted, written = (recipe.model_dump(exclude=PLACES) for recipe in (planned, resolved[0][0]))
    if names := ", ".join(sorted(name for name, value in wanted.items() if value != written[name])):
        raise ConfigurationError(
            f"{target.folder}: {names}: the files make another job than the plan; give these values as key=value"
        )


RECORD = "plan.json"  # names the files of its plan under "files", each with a digest
RECIPE = "recipe.yaml"  # stays when a later plan has none: recipes of the user may have it as their base


def write_files(folder: str, texts: Mapping[str, str], record: Mapping[str, Any]) -> list[str]:
    """Write a plan's files and its record, and remove other files of the earlier plan in the folder.

    Args:
        folder: created if it does not exist.
        texts: content by name.
        record: content of plan.json.

    Returns:
        The names of the files.

    Raises:
        ConfigurationError: a file that would be replaced or removed is not as an earlier plan wrote it.
    """
    directory = Path(folder)
    digests = {name: _digest(text.encode()) for name, text in texts.items()}
    whole = {**texts, RECORD: json.dumps({**record, "files": digests}, indent=1) + "\n"}
    with storage_errors(directory):
        earlier = _earlier(directory)
        names = dict.fromkeys([*digests, *(name for name in earlier or () if name != RECIPE)])
        present = {name: _digest((directory / name).read_bytes()) for name in names if (directory / name).exists()}
        legal = earlier or {}
        changed = [name for name, digest in present.items() if digest not in (digests.get(name), legal.get(name))]
        changed += [RECORD] if earlier is None else []
        if changed:
            told = f"--output {directory}: {', '.join(changed)}: not written by an earlier plan, or changed since"
            raise ConfigurationError(f"{told}; move what you need away, or give another folder")
        directory.mkdir(parents=True, exist_ok=True)
        for name in present:
            if name not in digests:
                (directory / name).unlink()
        for name, text in whole.items():
            path = directory / name
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
    return [*whole]


def _earlier(directory: Path) -> dict[str, str] | None:
    """Read the digests of an earlier plan's files; {} without one, None if plan.json is another file of that name."""
    path = directory / RECORD
    record = read_record(path, {"files": {"*": str}})
    if record.value is None:
        return {} if record.is_absent else None
    # names alone: nothing outside of the folder is ever removed
    return {name: digest for name, digest in record.value["files"].items() if Path(name).name == name}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
